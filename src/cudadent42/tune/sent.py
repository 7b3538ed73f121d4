"""Which files of a tuning's arms workers elsewhere were sent: on record, and the same until its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cudadent42.base.errors import UsageError
from cudadent42.base.parcels import Parcel
from cudadent42.fleet.cargo import digests_of
from cudadent42.model.records import Plan
from cudadent42.tune.journal import Sent
from cudadent42.tune.state import State

_SHORT = 12


def newly_sent(state: State, parcels: Callable[[Plan], tuple[Parcel, ...]]) -> Sent | None:
    """What is to be put on record before it is raced; None where all of it is.

    ``parcels``: of an engine. Raises UsageError where files are others than those that were raced before.
    """
    setup, before = state.setup, state.sent
    digests = digests_of(parcels(replace(setup.plan, implementations=tuple(setup.arms.values()))))
    files = {arm: digests[name] for arm, name in setup.arms.items() if name in digests}
    for arm, digest in files.items():
        if before.get(arm, digest) != digest:
            raise UsageError(
                f"the files of {arm!r} are others than those that this tuning has raced ({digest[:_SHORT]}, and not "
                f"{before[arm][:_SHORT]}); put the former back, or begin another tuning with --output-dir"
            )
    new = {arm: digest for arm, digest in files.items() if arm not in before}
    return Sent(new) if new else None
