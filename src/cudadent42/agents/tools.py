"""The tools that an agent has: what each takes and gives, as records, from which the schemas are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cudadent42.agents.desk import State
from cudadent42.model.history import Point
from cudadent42.model.integrity import Finding
from cudadent42.model.records import Check, Results, TimerKind, VerifiedCase
from cudadent42.profiles.records import Diagnosis


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """No arguments."""


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""


@dataclass(frozen=True, kw_only=True)
class Spending:
    """Limits of what is started. There are no defaults: whoever starts work says what it may cost."""

    max_minutes: float
    """After which it is stopped."""
    max_money: float
    """US dollars that it may cost at most; 0 on a machine that costs nothing."""


@dataclass(frozen=True, kw_only=True)
class WhatToRun(OnDevice, Spending):
    implementation: str = ""
    """path/to/file.py:callable or path/to/kernel.toml in the project, or a name such as `cudadent42`. Empty: the
    suite's own."""
    suite: str = ""
    """A built-in suite or a TOML file in the project. Empty: `default`, or `race` against a revision."""
    cases: tuple[str, ...] = ()
    """Names of the suite's cases, as name or name/dtype. Empty: all."""
    dtypes: tuple[str, ...] = ()
    """Of `fp16`, `bf16`, `fp32`. Empty: the suite's."""
    untrusted: bool = False
    """Confine candidates to a sandbox. Refused where the machine has too little to make one of."""


@dataclass(frozen=True, kw_only=True)
class VerifyArguments(WhatToRun):
    """What is compared with float64."""


@dataclass(frozen=True, kw_only=True)
class RaceArguments(WhatToRun):
    """What is raced, against what, and how."""

    against: str = ""
    """A git revision: the project's files as they are now are raced against those. Empty: against the suite's
    baseline."""
    repeats: int | None = None
    """Paired blocks per case. Empty: the suite's."""
    timer: TimerKind | None = None
    """What a latency contains. Empty: the suite's."""
    sealed: bool = False
    """Audit everything, whatever the result."""


@dataclass(frozen=True, kw_only=True)
class WhichRace:
    race: str
    """As race_start named it."""


@dataclass(frozen=True, kw_only=True)
class StatusArguments(WhichRace):
    wait_s: float = 0.0
    """Seconds to wait for its end, up to 300; progress is reported meanwhile."""


@dataclass(frozen=True, kw_only=True)
class DoctorArguments(Spending):
    folder: str
    """A run folder in the project."""
    case: str = ""
    """Of the run. Empty: its slowest."""
    implementation: str = ""
    """Of the run. Empty: its candidate."""
    measure: bool = False
    """Whether to profile anew, where this is the run's machine. It runs the candidate, and in no sandbox."""


@dataclass(frozen=True, kw_only=True)
class HistoryArguments:
    case: str = ""
    """As name or name/dtype. Empty: list the cases on record."""
    implementation: str = ""
    """Empty: the candidate of each run."""


@dataclass(frozen=True)
class PreflightAnswer:
    ready: bool
    """Whether this machine may measure."""
    summary: str
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class VerifyAnswer:
    passed: bool
    checked: int
    """Results that were compared."""
    wrong: tuple[VerifiedCase, ...]
    skipped: dict[str, str]
    """What was not compared, with the reason."""
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class RaceStarted:
    race: str
    """For race_status, race_result and stop."""
    minutes: float
    """After which it is stopped."""
    may_cost_usd: float


@dataclass(frozen=True)
class RaceStatus:
    race: str
    state: State
    stage: str
    progress: float
    """From 0 to 1."""
    minutes: float
    """Since it began; of one that ended, that it took."""
    cost_usd: float
    notes: tuple[str, ...]
    """What was said on the way, the last of it."""
    error: str
    """Why there is no result."""


@dataclass(frozen=True)
class RaceResult:
    race: str
    folder: str
    """The run folder, which has everything."""
    claim_allowed: bool
    claim_reason: str
    quote: str
    """The one sentence that may be quoted of this race. Empty: nothing may be."""
    exit_code: int
    """As of `cudadent42 run`."""
    verified: bool
    results: Results | None
    """None where nothing was measured."""


@dataclass(frozen=True)
class OnRecord:
    """A case that the ledger has."""

    name: str
    runs: int


@dataclass(frozen=True)
class HistoryTrack:
    """Runs that can be compared, in the order of time."""

    title: str
    points: tuple[Point, ...]
    machine_changes: tuple[int, ...]
    """Numbers of the points that another machine measured than the one before."""


@dataclass(frozen=True)
class HistoryAnswer:
    cases: tuple[OnRecord, ...] = ()
    tracks: tuple[HistoryTrack, ...] = ()


@dataclass(frozen=True)
class Spent:
    """One start."""

    name: str
    state: State
    minutes: float
    cost_usd: float


@dataclass(frozen=True)
class Budget:
    max_minutes: float
    """That a start may ask for."""
    max_money: float
    """US dollars for all starts of this server together."""
    ask_above: float
    """US dollars: the person is asked before a start that may cost more."""
    rate: str
    usd_per_hour: float
    """Of this machine, by its rate."""
    committed_usd: float
    """What starts cost, and what running ones may."""
    left_usd: float
    starts: tuple[Spent, ...]


@dataclass(frozen=True)
class Tool:
    name: str
    takes: type[Any]
    gives: type[Any]
    description: str
    read_only: bool = False
    idempotent: bool = False
    destructive: bool = False


TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(
            "preflight",
            OnDevice,
            PreflightAnswer,
            "Check that this machine is ready to measure. Begin with it. Each failure comes with the command that "
            "mends it.",
            read_only=True,
            idempotent=True,
        ),
        Tool(
            "verify",
            VerifyArguments,
            VerifyAnswer,
            "Compare an implementation's results with float64, on every case of a suite and on adversarial inputs. "
            "What is wrong is never timed.",
            idempotent=True,
        ),
        Tool(
            "race_start",
            RaceArguments,
            RaceStarted,
            "Begin a race: build, verify, time in paired blocks, audit. Returns at once. One race at a time on a "
            "device.",
        ),
        Tool(
            "race_status",
            StatusArguments,
            RaceStatus,
            "Say how far a race is.",
            read_only=True,
            idempotent=True,
        ),
        Tool(
            "race_result",
            WhichRace,
            RaceResult,
            "Give the result of a race that has ended, checked against its samples. Quote nothing but `quote`: "
            "where claim_allowed is false there is nothing to quote, and claim_reason says why.",
            read_only=True,
            idempotent=True,
        ),
        Tool(
            "doctor",
            DoctorArguments,
            Diagnosis,
            "Say what holds a run's slowest case back, and the experiment to try first.",
        ),
        Tool(
            "history",
            HistoryArguments,
            HistoryAnswer,
            "Show a case's speed-up over time and revisions, from the ledger of runs.",
            read_only=True,
            idempotent=True,
        ),
        Tool(
            "budget",
            Nothing,
            Budget,
            "Show the person's limits, what this machine costs and what is left.",
            read_only=True,
            idempotent=True,
        ),
        Tool(
            "stop",
            WhichRace,
            RaceStatus,
            "Stop a race of this server. What it measured is kept.",
            idempotent=True,
            destructive=True,
        ),
    )
}
