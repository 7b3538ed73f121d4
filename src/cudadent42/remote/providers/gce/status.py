"""What the provider says of a start on record: whether its instance runs, and from whose start."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from cudadent42.base.errors import LabError, UsageError
from cudadent42.remote.core.address import GceAddress, parse
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.core.status import ENDED, NOT_ANSWERED, Corrected, Status, correct, is_under_way
from cudadent42.remote.providers.gce import fate, machine
from cudadent42.remote.providers.gce.fate import End, Fate
from cudadent42.remote.providers.gce.identity import provider_start, taken_over
from cudadent42.remote.providers.gce.machine import Machine
from cudadent42.runs.starts import MachineStart, StartOutcome


@dataclass(frozen=True)
class Started(Machine):
    """An instance of a line of the journal."""

    def status(self, start: MachineStart, now: datetime) -> Status:
        return _status(self, start, now)


def of_start(start: MachineStart) -> Started | None:
    """The instance that a line of the journal names; None where it names none."""
    try:
        address = parse(start.machine)
    except UsageError:
        return None
    return Started(str(address), start.rate) if isinstance(address, GceAddress) else None


def _status(instance: Machine, start: MachineStart, now: datetime) -> Status:
    try:
        description = instance.find()
        state = machine.state_in(description)
        runs = state in (MachineState.STARTING, MachineState.RUNNING)
        other = taken_over(instance, description, start) if runs and description is not None else None
    except LabError as error:
        return Status(None, str(error))
    if other is not None:
        closed = start.ended is not None
        told = None if closed else correct(start, other.outcome, other.reason, other.time)
        return Status(state, "", told, theirs=True)
    if runs and description is not None:
        return Status(state, "", _restarted(start, provider_start(description)))
    if state.costs:
        return Status(state)
    left = "made for a run; its disk costs until it is deleted" if state is MachineState.STOPPED else ""
    if start.outcome in ENDED:
        if left or not instance.fresh:
            return Status(state, left)
        why = start.reason or "it is not there any more"
        return Status(state, "", correct(start, StartOutcome.DELETED, why))
    if is_under_way(start, now):
        return Status(state, NOT_ANSWERED)
    end = fate.what_happened(instance, start.requested)
    return Status(
        state, left, correct(start, _outcome(start, state, end), str(end), machine.moment(end.time))
    )


def _restarted(start: MachineStart, called: str) -> Corrected | None:
    """What is to be corrected about a start of ours whose machine runs, by the provider's word for it."""
    if start.outcome in ENDED:
        return correct(start, StartOutcome.READY, "it runs, although it had ended", None, called)
    if start.provider_start not in ("", called):
        # Restarted by the provider itself, which forgets that within weeks; it would look like somebody else's then.
        correct(start, StartOutcome.READY, start.reason, None, called)
    return None


def _outcome(start: MachineStart, state: MachineState, end: End) -> StartOutcome:
    if state is MachineState.STOPPED:
        return StartOutcome.STOPPED
    if end.fate is Fate.DELETED:
        return StartOutcome.DELETED
    if start.outcome is StartOutcome.REQUESTED and end.fate is Fate.UNKNOWN:
        return StartOutcome.FAILED  # it was never made, as far as anybody knows
    return StartOutcome.LOST
