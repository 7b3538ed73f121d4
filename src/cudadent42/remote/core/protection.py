"""A machine is given its limits before a run begins on it, and they are taken back when the run is."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone

from cudadent42.base.errors import LabError, MachineNotReadyError
from cudadent42.cost.rates import Rate
from cudadent42.remote.core import watchdog
from cudadent42.remote.core.consent import NOBODY, WHILE_IT_COSTS_S, Consent
from cudadent42.remote.core.job import BusyError, Workspace
from cudadent42.remote.core.money import Estimate, seconds_for
from cudadent42.remote.core.policy import Ending, parse_after
from cudadent42.remote.core.record import CloudRecord
from cudadent42.remote.core.run import persistently
from cudadent42.remote.core.ssh import ConnectionLostError
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.core.watchdog import Action, Keeper, Limits

IDLE_S = 900
"""A machine that was started for a run is powered off when it had nothing to do for so long. A break in the connection
that `persistently` bridges is shorter, and at the dearest of the shipped rates this costs less than two dollars."""


BUDGET_S = 24 * 3600
"""What a machine that was started for a run may be on where nobody named a sum. A run that hangs is never idle, so that
it would be paid for until somebody looks. A day is longer than any run that was not planned as a long one."""
BUDGET_OF_ESTIMATE = 2.0
"""A run that is estimated at more than half a day has so many times that: an estimate that is too short ends no run."""


@dataclass(frozen=True)
class Limit:
    """What a run may cost."""

    usd: float
    rate: Rate


@dataclass(frozen=True)
class Terms:
    """What was agreed on for a run, before its machine was started."""

    limit: Limit | None = None
    """None where no sum was named."""
    run_s: float = 0.0
    """What the run is estimated to take."""
    consent: Consent = NOBODY
    """To what turns out only there."""
    estimate: Estimate | None = None
    """None where the rate is not known, or the machine is the user's own."""


ANY_TERMS = Terms()
"""No sum, and nobody to be asked."""


def protect(workspace: Workspace, cloud: CloudRecord | None, terms: Terms, say: Say) -> None:
    """Arm the watchdog at ``workspace`` for a run; say what an earlier one did there.

    ``cloud`` is None for a machine that was not started from here.

    Raises:
        UsageError: the sum that the run may cost is spent already.
        MachineNotReadyError: nothing there can hold it; or, where none was named, nothing but this machine would end a
            machine that was started from here, and nobody agrees to that.
        BusyError, ConnectionLostError: no run can begin there.
    """
    tell(workspace, say)
    limits = limits_for(cloud, terms, datetime.now(timezone.utc))
    try:
        if not limits.hold:
            # Those of an earlier run, that nobody brought back.
            only = None if _is_ours(cloud) else Action.END
            persistently(lambda: watchdog.disarm(workspace, only), say, workspace.on_lost)
            return
        keeper = persistently(lambda: watchdog.arm(workspace, limits), say, workspace.on_lost)
    except (BusyError, ConnectionLostError):
        raise
    except LabError as error:
        what = f"{error}; nothing but this machine ends the costs of {workspace.remote.name}"
        if terms.limit is not None:
            raise MachineNotReadyError(str(error)) from error
        if limits.hold and not terms.consent.to(f"{what}. Run there all the same?", WHILE_IT_COSTS_S):
            raise MachineNotReadyError(
                f"{what}; agree to that with --yes, if you will look after it"
            ) from error
        say(what)
        return
    again = "; not after a restart of it, since neither systemd nor cron is there to start the watchdog again"
    say(f"{workspace.remote.name}: {_holds(workspace, limits)}{again if keeper is Keeper.PROCESS else ''}")


def _holds(workspace: Workspace, limits: Limits) -> str:
    """What will be done now that ``limits`` were given, in words."""
    if limits.action == Action.END:
        with suppress(LabError):
            watch = watchdog.report(workspace)
            if watch is not None and watch.action != Action.END:
                return f"{watch.line()}: an earlier run had it powered off, so that the limit of this one does too"
    return limits.line()


def release(workspace: Workspace, cloud: CloudRecord | None, say: Say) -> None:
    """Say what the watchdog did, and take the limits back, now that the run is. One that does not answer keeps them.

    ``cloud`` as for ``protect``: that a machine is powered off is only taken back by who started it.
    """
    tell(workspace, say)
    with suppress(LabError):
        watchdog.disarm(workspace, None if _is_ours(cloud) else Action.END)


def release_when_off(workspace: Workspace, say: Say) -> None:
    """As ``release``, of a machine that is about to be ended: that can fail, and until it is off its limits hold."""
    tell(workspace, say)
    with suppress(LabError):
        watchdog.leave(workspace)


def tell(workspace: Workspace, say: Say) -> None:
    """Say what the watchdog did there, if it did anything and the machine answers."""
    with suppress(LabError):
        watch = watchdog.report(workspace)
        if watch is not None and watch.acted is not None:
            say(f"{workspace.remote.name}: {watch.line()}")


def limits_for(cloud: CloudRecord | None, terms: Terms, now: datetime) -> Limits:
    """What a machine may do for a run that begins ``now``. Raises UsageError where the money is spent already.

    One that was started for runs is powered off; of one that ran before, or is somebody's own, only the run is ended.
    Where no sum was named, the former has ``BUDGET_S`` all the same, unless it is to be kept.
    """
    limit = terms.limit
    ours = _is_ours(cloud)
    spent_s = (now - datetime.fromisoformat(cloud.since)).total_seconds() if cloud and ours else 0.0
    spent_s = max(0.0, spent_s)  # a clock that was set back buys no time
    budget_s = 0 if limit is None else seconds_for(limit.usd, limit.rate, spent_s, ending=ours)
    if cloud is None or not ours:
        return Limits(budget_s=budget_s, action=Action.END)
    idle_s = _idle_s(cloud)
    if idle_s and limit is None:
        budget_s = max(BUDGET_S, math.ceil(BUDGET_OF_ESTIMATE * terms.run_s))
    return Limits(idle_s=idle_s, budget_s=budget_s)


def _is_ours(cloud: CloudRecord | None) -> bool:
    """Started from here, and not by somebody else."""
    return cloud is not None and cloud.start is not None


def _idle_s(cloud: CloudRecord) -> int:
    after = parse_after(cloud.after)
    if after.ending is Ending.KEEP:
        return 0
    # Whoever keeps it for some minutes means after the run; this holds when nobody is left to count them.
    return max(IDLE_S, 60 * (after.minutes or 0))
