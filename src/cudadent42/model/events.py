"""What a worker tells its parent while it works, as one JSON line each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cudadent42.base.reading import parse_json
from cudadent42.base.serialise import decode, encode
from cudadent42.model.integrity import Finding, Spent
from cudadent42.model.records import BenchReport, BuildFailure, BuildReport, Conditions, Sample, VerifiedCase
from flashmoe_science.jit.records import KernelBuild


@dataclass(frozen=True)
class Progress:
    """A stage has come this far."""

    stage: str
    """``verify`` or ``bench``."""
    done: int
    """Units finished: inputs x implementations when verifying, visits to a case when measuring."""
    total: int
    what: str
    """What is being worked on now."""
    fraction: float
    """Share of the stage's estimated time that has passed, 0 to 1."""


@dataclass(frozen=True)
class Alive:
    """Something that takes long goes on, such as the float64 reference of a long sequence."""


@dataclass(frozen=True)
class KernelBuilt:
    """A kernel of a version that is raced."""

    build: KernelBuild


@dataclass(frozen=True)
class KernelFailed:
    failure: BuildFailure


@dataclass(frozen=True)
class CaseVerified:
    result: VerifiedCase


@dataclass(frozen=True)
class BlockMeasured:
    """One paired block: a sample of every implementation, in the order in which they were taken."""

    samples: tuple[Sample, ...]
    conditions: Conditions


@dataclass(frozen=True)
class PlanningTimed:
    """What an implementation does once a step, apart from its calls."""

    key: str
    """``Case.id/implementation``."""
    planning_ms: float


@dataclass(frozen=True)
class PeaksMeasured:
    peaks: dict[str, float]
    """Ceilings of the device, as ``Results.peaks``."""


@dataclass(frozen=True)
class Skipped:
    """A case, or one implementation of it, is not verified or not timed."""

    stage: str
    key: str
    """``Case.id``, ``Case.id/implementation`` or, when verifying, an implementation's name."""
    reason: str


@dataclass(frozen=True)
class IntegrityFound:
    """Something that a number must not rest on."""

    finding: Finding


@dataclass(frozen=True)
class KeptApart:
    """Settings of an implementation's own, or whose work it says that it runs, in words."""

    text: str


@dataclass(frozen=True)
class Accounted:
    """What a bench stage took until its end, and its checks of that."""

    measuring: Spent
    checks: dict[str, Spent]


@dataclass(frozen=True)
class Message:
    text: str


@dataclass(frozen=True)
class WorkerLost:
    """The worker died, was killed because it hung, or left because its GPU context was damaged."""

    doing: str
    reason: str


@dataclass(frozen=True)
class StageDone:
    stage: str


@dataclass(frozen=True)
class StageFailed:
    """The stage cannot be done as asked; ``exit_code`` is that of the error to raise."""

    message: str
    exit_code: int


Event = (
    Progress
    | Alive
    | KernelBuilt
    | KernelFailed
    | CaseVerified
    | BlockMeasured
    | PlanningTimed
    | PeaksMeasured
    | Skipped
    | IntegrityFound
    | KeptApart
    | Accounted
    | Message
    | WorkerLost
    | StageDone
    | StageFailed
)

Emit = Callable[[Event], None]
"""Told of every event as it happens."""

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Progress, Alive, KernelBuilt, KernelFailed, CaseVerified, BlockMeasured, PeaksMeasured),
        *(PlanningTimed, Skipped, IntegrityFound, KeptApart, Accounted, Message, WorkerLost),
        *(StageDone, StageFailed),
    )
}


def to_line(event: Event) -> str:
    return json.dumps({"event": type(event).__name__, "data": encode(event)}, allow_nan=False)


def from_line(line: str) -> Event:
    """Raises ValueError on a line that is not an event."""
    data = parse_json(line)
    if not isinstance(data, dict) or data.get("event") not in _KINDS:
        raise ValueError(f"not an event: {line[:80]!r}")
    event: Event = decode(_KINDS[data["event"]], data["data"])
    return event


RANDOM = "random"
"""``Doing.input`` of the inputs of a planned case that are drawn by chance."""

LOADING = "loading"
"""``Doing.input`` while an implementation's own files are imported."""

WHILE_TIMING = "while timing"
"""``VerifiedCase.input`` of an implementation that took its worker along when it was timed."""

BUILDING = "building"
"""``Doing.input`` while the kernels of a version are compiled."""


@dataclass(frozen=True)
class Doing:
    """What a worker is about to run. Not an event: noted in a file, so that a parent can read it after a
    crash."""

    index: int
    """Of the unit when verifying, of the visit to a case when measuring."""
    case: str
    implementation: str
    input: str = ""

    @property
    def key(self) -> str:
        return f"{self.case}/{self.implementation}"


Mark = Callable[[Doing], None]
"""Told of what is about to run."""


def no_mark(doing: Doing) -> None:
    """For callers in the same process: nobody to tell."""


class BenchLog:
    """Gathers the events of a bench stage; whole at any moment, so an interrupted run keeps what it has."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._skipped: dict[str, str] = {}
        self._rechecked: list[VerifiedCase] = []
        self._conditions: list[Conditions] = []
        self._findings: list[Finding] = []
        self._kept_apart: list[str] = []
        self._measuring = Spent()
        self._checks: dict[str, Spent] = {}
        self._planning_ms: dict[str, float] = {}

    def add(self, event: Event) -> None:
        if isinstance(event, BlockMeasured):
            self._samples.extend(event.samples)
            self._conditions.append(event.conditions)
        elif isinstance(event, Skipped) and event.stage == "bench":
            self._skipped[event.key] = event.reason
        elif isinstance(event, CaseVerified):
            self._rechecked.append(event.result)
        elif isinstance(event, IntegrityFound):
            self._findings.append(event.finding)
        elif isinstance(event, KeptApart):
            self._kept_apart.append(event.text)
        elif isinstance(event, PlanningTimed):
            self._planning_ms[event.key] = event.planning_ms
        elif isinstance(event, Accounted):
            self._measuring += event.measuring
            for check, spent in event.checks.items():
                self._checks[check] = self._checks.get(check, Spent()) + spent

    def blocks(self) -> dict[str, int]:
        """How many blocks of each case there are."""
        return {sample.case: sample.block + 1 for sample in self._samples}

    def report(self) -> BenchReport:
        return BenchReport(
            tuple(self._samples),
            dict(self._skipped),
            tuple(self._rechecked),
            tuple(self._conditions),
            tuple(self._findings),
            tuple(dict.fromkeys(self._kept_apart)),
            self._measuring,
            dict(self._checks),
            dict(self._planning_ms),
        )


class BuildLog:
    """Gathers the events of a build stage."""

    def __init__(self) -> None:
        self._kernels: list[KernelBuild] = []
        self._failures: list[BuildFailure] = []

    def add(self, event: Event) -> None:
        if isinstance(event, KernelBuilt):
            self._kernels.append(event.build)
        elif isinstance(event, KernelFailed):
            self._failures.append(event.failure)

    def report(self) -> BuildReport:
        return BuildReport(tuple(self._kernels), tuple(self._failures))
