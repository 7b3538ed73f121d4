"""What the referee asks of a contestant, a line of JSON each, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cudadent42.model.cases import TAGGED, Case
from cudadent42.model.integrity import Way
from cudadent42.model.records import Plan, VerifiedCase

SETS = 3
"""Of inputs, of each contestant's own, which the calls use by turns."""

GO, DONE = b".", b"."
"""Of one call of a turn, between a request and its answer: its inputs are there; its output is."""


NONE_LARGE = -1
"""`Ask.large` where no slot has large values."""


class Task(str, Enum):
    LOAD = "load"
    """The implementation."""
    READY = "ready"
    """Memory for a case, and preparation."""
    FILL = "fill"
    """New inputs of all calls into the judge's store, from which the referee takes them."""
    WAKE = "wake"
    """A pass over the values that are there, ahead of the clock: it wakes the device's context and clocks."""
    RUN = "run"
    """Calls, each on inputs of its own. In shared memory each begins and ends with a byte (`GO`, `DONE`)."""
    SHOW = "show"
    """What all outputs are (`sketch`), as the last request ahead of the clock's end."""
    COMPARE = "compare"
    """All outputs of both with each other. Of the judge."""
    FETCH = "fetch"
    """Outputs into the shared memory."""
    JUDGE = "judge"
    """The candidate's outputs. Of the judge."""


class Pace(str, Enum):
    """What is done for each slot of a run."""

    CALLS = "calls"
    COPIES = "copies"
    """Inputs and outputs are copied as with a call, which is left out."""
    PREPARED_COPIES = "prepared copies"
    """The same, with the preparation of an implementation that copies its inputs."""


@dataclass(frozen=True)
class Ask:
    task: Task
    plan: Plan | None = None
    implementation: str = ""
    cases: tuple[Case, ...] = field(default=(), metadata=TAGGED.metadata)
    """The one that is made ready."""
    calls: int = 0
    """Slots that are made, used or filled."""
    seed: int = 0
    large: int = NONE_LARGE
    """The slot that has some large values."""
    pace: Pace = Pace.CALLS
    chosen: tuple[int, ...] = ()
    """Slots to fetch or to judge."""
    way: Way = Way.SHARED
    awake: bool = False
    """Whether the beginning of a call is waited for awake: nobody gains by not sleeping then."""
    challenge: int = 0
    """The seed of a sketch."""
    shown: str = ""
    """The candidate's sketches."""


@dataclass(frozen=True)
class Answer:
    """``error`` is empty where all went well; ``declined``, where the case is done."""

    error: str = ""
    declined: str = ""
    judged: tuple[VerifiedCase, ...] = ()
    calls: int = 0
    """That a case was made ready for: those asked for, or as many as there is memory for."""
    way: Way = Way.SHARED
    """In which it was made ready."""
    input_bytes: int = 0
    output_bytes: int = 0
    """Of a call in shared memory: its inputs, and behind them its output."""
    prepares: bool = False
    """Whether an implementation was made ready that is prepared again for each call."""
    shown: str = ""
    """Sketches of all outputs (`sketch.written`)."""
    unlike: tuple[int, ...] = ()
    """Slots in which the candidate's output is not like the judge's own."""
    late: str = ""
    """How what was fetched differs from what was said when the clock stopped; empty where it does not."""
