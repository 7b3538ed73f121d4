"""What a user has to agree to, because nothing but this machine would end what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cudadent42.base.errors import UsageError
from cudadent42.remote.core import hosts
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.providers.gce.machine import Machine
from cudadent42.remote.providers.gce.reach import ANSWER_S

WHILE_IT_COSTS_S = 120.0
"""For an answer while a machine is on that nothing else ends: who walked away has not agreed."""

Ask = Callable[[str, float | None], bool]
"""Puts a question, to be answered within so many seconds (None: at leisure). No answer is a no."""


@dataclass(frozen=True)
class Consent:
    """How a user agrees: beforehand, or when asked. By default nobody does."""

    given: bool = False
    """With ``--yes``."""
    ask: Ask | None = None
    """None where there is nobody to answer."""

    def to(self, question: str, within_s: float | None = None) -> bool:
        return self.given or self.asked(question, within_s)

    def asked(self, question: str, within_s: float | None = None) -> bool:
        return self.ask is not None and self.ask(question, within_s)


NOBODY = Consent()


def agree_to_start(remote: Remote, machine: Machine, consent: Consent) -> None:
    """Agree that ``machine`` of ``remote`` is started without a limit of its own with the provider.

    From the request on until it answers, nothing could end it but this machine. The answer is kept in the remote, so
    that it is asked for once; what is given with ``--yes`` holds for that run alone.

    Raises UsageError where nobody agrees.
    """
    remembered = (
        remote.unguarded_start and remote.address == machine.address
    )  # a name may be another's by now
    if remembered or consent.given:
        return
    what = (
        f"{machine.name} has no limit of its own with the provider: from the request for its start until it answers, "
        f"up to {ANSWER_S / 60:.0f} min, only this machine can end it"
    )
    if consent.asked(
        f"{what}, so it goes on costing money if this one dies then. Start it, now and in future?"
    ):
        if remote.address == machine.address:
            _remember(remote)
        return
    at = machine.address
    raise UsageError(
        f"{what}; nothing was started. Take a specification (remote add --spec), or give it a limit once, while it is "
        f"stopped: gcloud compute instances set-scheduling {at.instance} --zone={at.zone} --project={at.project} "
        "--max-run-duration=8h --instance-termination-action=STOP; or agree with --yes, or for good with "
        "remote add --unguarded-start"
    )


def _remember(remote: Remote) -> None:
    registered = hosts.remotes().get(remote.name)
    if registered is not None and registered.address == remote.address:
        hosts.save(replace(registered, unguarded_start=True))
