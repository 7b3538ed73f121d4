"""What a gate file says, what it is held against, and what comes of it. Plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from cudadent42.base.errors import ExitCode

SCHEMA_VERSION = 1
"""Of gate files and of ``gates.json``."""

PROFILE_PREFIX = "profile."
"""Of the names under which a profile's metrics are found."""


class Relation(str, Enum):
    """How a metric is compared with what is wanted: the key of the gate file that holds the threshold."""

    AT_LEAST = "at_least"
    AT_MOST = "at_most"
    ABOVE = "above"
    BELOW = "below"
    WITHIN = "within"
    """Within a share of the value that ``of`` gives."""
    IS = "is"
    IS_NOT = "is_not"


class OnFailure(str, Enum):
    """What a gate that is not passed leads to."""

    FAIL = "fail"
    """A non-zero exit code."""
    WARN = "warn"
    """A line of output, and nothing else."""
    STOP = "stop"
    """As ``fail``; and a session ends."""


class Decision(str, Enum):
    """What became of a gate."""

    PASSED = "passed"
    FAILED = "failed"
    UNDECIDED = "undecided"
    """The measurement could not tell: its interval reaches over the threshold, or there is no value."""


class Scope(str, Enum):
    """What a gate is asked of, unless it names cases."""

    OVERALL = "overall"
    """The run as a whole: of a speed-up the geometric mean."""
    EVERY = "every"
    """Each case by itself; one that fails fails the gate."""


@dataclass(frozen=True)
class Gate:
    """One condition."""

    name: str
    metric: str
    relation: Relation
    wanted: float | str
    """The threshold; with ``within`` the half-width of the band as a share of ``of``; a word with ``is``."""
    of: float = math.nan
    """The middle of the band that ``within`` is about."""
    scope: Scope = Scope.OVERALL
    cases: tuple[str, ...] = ()
    """Names or ids (``name/dtype``) of the cases that it is asked of; then ``scope`` does not matter."""
    on_failure: OnFailure = OnFailure.FAIL

    @property
    def band(self) -> tuple[float, float]:
        """The lowest and the highest number that pass; without meaning for words."""
        if isinstance(self.wanted, str):
            return math.nan, math.nan
        if self.relation is Relation.WITHIN:
            half = abs(self.of) * self.wanted
            return self.of - half, self.of + half
        if self.relation in (Relation.AT_LEAST, Relation.ABOVE):
            return self.wanted, math.inf
        return -math.inf, self.wanted


@dataclass(frozen=True)
class GateFile:
    """The gates of one file, in its order."""

    name: str
    gates: tuple[Gate, ...]
    description: str = ""


@dataclass(frozen=True)
class Measured:
    """One metric's value. ``low`` and ``high`` are NaN where it is exact or nothing is known of its error."""

    value: float | str
    low: float = math.nan
    high: float = math.nan
    """95 % interval, beside what the control differs from itself."""
    blocks: int = 0
    """Paired blocks behind the interval; 0 where there is none."""
    reason: str = ""
    """Why there is no value, where ``value`` is NaN."""
    from_blocks: tuple[float, float] | None = None
    """The interval without what the control adds to it; None where it adds nothing."""

    @property
    def exact(self) -> bool:
        return self.blocks == 0


@dataclass(frozen=True)
class Evidence:
    """What gates are held against: metrics of a run as a whole and of its cases."""

    overall: Mapping[str, Measured] = field(default_factory=dict)
    cases: Mapping[str, Mapping[str, Measured]] = field(default_factory=dict)
    """By metric, then by ``Case.id``."""

    def with_metrics(self, extra: Mapping[str, float]) -> Evidence:
        """These metrics and exact ones of the caller's, which take precedence."""
        return self.with_measured({name: Measured(value) for name, value in extra.items()})

    def with_measured(self, extra: Mapping[str, Measured]) -> Evidence:
        """Likewise, with intervals."""
        return replace(self, overall={**self.overall, **extra})


@dataclass(frozen=True)
class Finding:
    """One gate on one case, or on the run as a whole."""

    case: str
    """``Case.id``; empty for the whole run."""
    decision: Decision
    value: float | str
    low: float
    high: float
    distance: float
    """From the value to the nearest end of what passes: positive inside, negative outside; NaN for words."""
    note: str
    """Whether the measurement was able to tell, and what would help if not."""


@dataclass(frozen=True)
class GateOutcome:
    """One gate with all its findings."""

    gate: Gate
    decision: Decision
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class GateReport:
    """``gates.json``."""

    file: str
    outcomes: tuple[GateOutcome, ...]

    @property
    def decision(self) -> Decision:
        """Over the gates that count (not those that only warn): failed before undecided before passed."""
        decisions = {outcome.decision for outcome in self.outcomes if counts(outcome.gate)}
        for decision in (Decision.FAILED, Decision.UNDECIDED):
            if decision in decisions:
                return decision
        return Decision.PASSED

    @property
    def passed(self) -> bool:
        return self.decision is Decision.PASSED

    @property
    def stopped_by(self) -> str:
        """The first gate that failed of those that end a session; empty for none. One that could not be decided does
        not end it."""
        stops = (each for each in self.outcomes if each.gate.on_failure is OnFailure.STOP)
        return next((each.gate.name for each in stops if each.decision is Decision.FAILED), "")

    @property
    def exit_code(self) -> ExitCode:
        return {
            Decision.PASSED: ExitCode.PASS,
            Decision.FAILED: ExitCode.GATE_FAILED,
            Decision.UNDECIDED: ExitCode.GATE_UNDECIDED,
        }[self.decision]


def wants_profile(file: GateFile) -> bool:
    """Whether a gate of the file is about what only a profile knows."""
    return any(gate.metric.startswith(PROFILE_PREFIX) for gate in file.gates)


def counts(gate: Gate) -> bool:
    """Whether the gate has a say in the exit code."""
    return gate.on_failure is not OnFailure.WARN
