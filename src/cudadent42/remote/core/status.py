"""What a provider says of a start on record, and how the journal of starts is corrected where it was wrong."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from cudadent42.base.errors import UsageError
from cudadent42.remote.core.states import MachineState
from cudadent42.runs import starts
from cudadent42.runs.starts import MachineStart, StartOutcome

ENDED = (StartOutcome.STOPPED, StartOutcome.LOST)
"""It does not run; where it was made for a run, its disk may be there."""

UNDER_WAY = timedelta(minutes=15)
"""For this long after a start was put on record, whoever asked for it may still be waiting for the answer: as long as
any call of a provider is waited for."""

NOT_ANSWERED = "its start is on record, and the provider has not answered yet"


@dataclass(frozen=True)
class Corrected:
    """A line of the journal that was not true any more."""

    start: MachineStart
    outcome: StartOutcome
    reason: str


@dataclass(frozen=True)
class Status:
    """What the provider says of a start."""

    state: MachineState | None
    """None where it could not be asked."""
    problem: str = ""
    """Why it could not be asked, or what is to be known besides; empty for nothing."""
    corrected: Corrected | None = None
    theirs: bool = False
    """It runs from somebody else's start by now."""


def is_under_way(start: MachineStart, now: datetime) -> bool:
    """Whether its request may still be answered."""
    asked = datetime.fromisoformat(start.requested)
    return start.outcome is StartOutcome.REQUESTED and now - asked < UNDER_WAY


def correct(
    start: MachineStart,
    outcome: StartOutcome,
    reason: str,
    moment: datetime | None = None,
    called: str = "",
) -> Corrected:
    """Put on record how a start really went on, at the ``moment`` that is known of it. Where the journal cannot be
    written, that is said with the reason."""
    try:
        starts.mark(start.id, outcome, reason, moment, called)
    except UsageError as error:
        # A full disk here must not keep the machines that are on from being shown and ended.
        reason = f"{reason}; {error}"
    return Corrected(start, outcome, reason)
