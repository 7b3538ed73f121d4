"""What happens in a session, one record a kind. The log of them is the session; all else is derived from it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePosixPath
from typing import Any

from cudadent42.base.reading import parse_json
from cudadent42.base.serialise import decode, encode
from cudadent42.session.clock import Instant
from cudadent42.session.protocol import Protocol

SCHEMA_VERSION = 1
"""Of a session folder; stated in its first event."""


class WorkOutcome(str, Enum):
    FINISHED = "finished"
    FAILED = "failed"
    """It ended with an error."""
    INTERRUPTED = "interrupted"
    """It was stopped, or its process was killed."""


class Decision(str, Enum):
    """Of gates, as `cudadent42.stages.gates` has it."""

    PASSED = "passed"
    FAILED = "failed"
    UNDECIDED = "undecided"


class End(str, Enum):
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Settings:
    """What a session measures and how; fixed at its start."""

    suite: str
    race_suite: str
    dtypes: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    repeats: int | None = None
    device: str = "auto"
    entry: str = ""
    """``path/to/file.py:callable`` or ``path/to/kernel.toml`` in the project, which changes are made to; empty for
    ``flashmoe_science``."""
    ignore_preflight: bool = False
    rate: str = "local"
    usd_per_hour: float = 0.0
    budget_minutes: float = 0.0
    budget_usd: float | None = None


@dataclass(frozen=True)
class Started:
    schema_version: int
    version: str
    """Of cudadent42."""
    name: str
    protocol: Protocol
    settings: Settings
    commit: str
    """That the project was at; empty outside of git."""
    base: str
    """Commit of a snapshot of the source as it was, changes included; empty outside of git."""


@dataclass(frozen=True)
class WorkStarted:
    checkpoint: str
    run: str
    """The run folder, relative to the session's; empty where the work has none."""
    attempt: int | None = None


@dataclass(frozen=True)
class WorkEnded:
    outcome: WorkOutcome
    detail: str
    samples: int
    """In the run folder's ``samples.csv``."""
    build_failed: bool = False
    speedup: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    verdict: str = ""
    """Of the comparison in the geometric mean."""
    control_excess: float = 0.0
    """How far the A/A control lies from 1 beyond the margin, as a share; not in the interval."""


@dataclass(frozen=True)
class Profiled:
    run: str
    summary: str
    """What limits it, in a sentence."""


@dataclass(frozen=True)
class Attempted:
    """A change of the source, about to be raced. Its diff is ``attempts/<number>.diff``."""

    number: int
    parent: str
    """Commit of the parent's snapshot."""
    commit: str
    """Of the attempt's."""
    things: int
    description: str
    """What changed, in words."""


@dataclass(frozen=True)
class Judged:
    """The gates of a checkpoint, held against a run."""

    run: str
    decision: Decision
    exit_code: int
    lines: tuple[str, ...]
    attempt: int | None = None
    ends: str = ""
    """The gate that ends the session by having failed (``on_failure = "stop"``); empty: the session goes on."""


@dataclass(frozen=True)
class Kept:
    """The attempt is the parent of what follows."""

    number: int
    failed: bool
    """It had failed its gate, and was kept all the same."""


@dataclass(frozen=True)
class Reverting:
    """The attempt's change is about to be taken back."""

    number: int


@dataclass(frozen=True)
class Reverted:
    number: int


@dataclass(frozen=True)
class Passed:
    checkpoint: str


@dataclass(frozen=True)
class Overridden:
    """A rule that was not followed, and why."""

    rule: str
    reason: str
    attempt: int | None = None
    """The change that it is for; None where the rule is not about changes."""


@dataclass(frozen=True)
class Warned:
    text: str


@dataclass(frozen=True)
class Noted:
    """By the user."""

    text: str


@dataclass(frozen=True)
class LessonsFired:
    lessons: dict[str, str] = field(default_factory=dict)
    """Titles by id."""


@dataclass(frozen=True)
class BudgetReached:
    what: str
    """``minutes`` or ``usd``."""
    spent: float
    limit: float


@dataclass(frozen=True)
class Ended:
    end: End
    reason: str = ""


Event = (
    Started
    | WorkStarted
    | WorkEnded
    | Profiled
    | Attempted
    | Judged
    | Kept
    | Reverting
    | Reverted
    | Passed
    | Overridden
    | Warned
    | Noted
    | LessonsFired
    | BudgetReached
    | Ended
)

KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Started, WorkStarted, WorkEnded, Profiled, Attempted, Judged, Kept, Reverting, Reverted),
        *(Passed, Overridden, Warned, Noted, LessonsFired, BudgetReached, Ended),
    )
}


@dataclass(frozen=True)
class Entry:
    """An event with its place in the log."""

    number: int
    """From 0."""
    at: Instant
    event: Event


def to_line(entry: Entry) -> str:
    record = {
        "number": entry.number,
        **encode(entry.at),
        "event": type(entry.event).__name__,
        "data": encode(entry.event),
    }
    return json.dumps(record, allow_nan=False)


def from_line(line: str) -> Entry:
    """Raises ValueError on a line that is not an event of this version."""
    data = parse_json(line)
    kind = data.get("event") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"not an event: {line[:80]!r}")
    at = decode(Instant, {name: data.get(name) for name in ("time", "uptime_s", "boot", "host")})
    _ = at.wall_s  # ValueError where it is no time
    if type(data.get("number")) is not int:
        raise ValueError("the event has no number")
    event: Event = decode(KINDS[data["event"]], data.get("data"))
    if isinstance(event, (WorkStarted, Profiled, Judged)):
        _check_run(event.run)
    return Entry(data["number"], at, event)


def _check_run(run: str) -> None:
    """A folder that was brought from elsewhere may say anything; what it names is read and written below it alone."""
    path = PurePosixPath(run)
    if path.is_absolute() or ".." in path.parts or "\0" in run:
        raise ValueError(f"the run folder {run[:80]!r} does not lie in the session's")
