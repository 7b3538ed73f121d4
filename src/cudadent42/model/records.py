"""The records that flow between the stages. Plain data: no behaviour beyond derived values.

    Plan -> MachineReport -> BuildReport -> VerifyReport -> Sample... -> Results

Every field's unit is in its name or its docstring. ``serialise`` turns any of them into JSON and back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from cudadent42.model.cases import TAGGED
from cudadent42.model.cases import Case as Case  # re-exported: a plan's part
from cudadent42.model.integrity import Finding, Integrity, Spent
from cudadent42.model.script import Prediction, Script
from flashmoe_science.jit.records import KernelBuild


class Status(str, Enum):
    """Outcome of one preflight check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


class Verdict(str, Enum):
    """Outcome of one comparison. ``undecided``: the interval straddles the margin."""

    FASTER = "faster"
    SLOWER = "slower"
    EQUAL = "equal"
    UNDECIDED = "undecided"


class Refusal(str, Enum):
    """Why samples allow no verdict, whatever they show. The verdict is then ``undecided``."""

    TOO_FEW_BLOCKS = "too few blocks"
    """Fewer than ``bench.verdicts.MIN_BLOCKS``."""
    DISTURBED = "disturbed"
    """The processors were taken away in too many blocks for the clock on the wall to say what a call takes."""
    UNLIKE_WINDOWS = "unlike windows"
    """A timed window of one side holds too few calls to be compared with the other's."""
    IMPOSSIBLE = "impossible"
    """A latency is below what this machine can do (``decisions.floor``)."""


class TimerKind(str, Enum):
    """What a latency contains."""

    CALL = "call"
    """The whole call, launch included: host clock on CPU, events around each call on CUDA."""
    CPU = "cpu"
    """Processor time of the process, which runs on one thread: what the code costs, whoever else uses the machine. CPU
    only."""
    GRAPH = "graph"
    """GPU time alone: replay of a CUDA graph that holds many copies of the call. CUDA only."""
    QUEUE = "queue"
    """GPU time alone: calls that are all launched before the first begins. CUDA only."""


class CacheState(str, Enum):
    """State of the last-level cache (L2 on a GPU) when a timed window opens."""

    WARM = "warm"
    """What the calls before left there."""
    COLD = "cold"
    """Nothing of a call's inputs: it is written over before each window, which has one call."""
    ROTATED = "rotated"
    """Nothing of them in windows of many calls either, which take turns over so many input sets, up to a bound
    (`timing.flush.input_sets`)."""


# ---------------------------------------------------------------- what to run


@dataclass(frozen=True)
class Version:
    """One state of a source tree, raced under a name of its own (`cudadent42.flows.race`)."""

    revision: str
    """As it was asked for: a git revision, ``WORKTREE`` or a folder's name."""
    commit: str
    """Empty for a working tree and a folder."""
    digest: str
    """SHA-256 over the files that were exported: their address in the cache of sources."""
    entry: str = ""
    """``path/to/file.py:callable`` or ``path/to/kernel.toml`` in the tree; empty for ``flashmoe_science``, and
    ``cudadent42[variant]`` for one of its kernels."""


@dataclass(frozen=True)
class Plan:
    """A run before it happens."""

    suite: str
    device: str
    """``cpu`` or ``cuda:N``."""
    cases: tuple[Case, ...] = field(metadata=TAGGED.metadata)
    baseline: str
    """Name of the implementation that every other is compared with."""
    implementations: tuple[str, ...]
    """Names, the baseline among them."""
    repeats: int
    """Paired blocks per case."""
    warmup: int
    """Blocks per case that are run and thrown away."""
    seed: int
    margin: float = 0.02
    """Practical margin: ratios between 1/(1 + margin) and 1 + margin are not a difference."""
    control: bool = True
    """Whether the baseline is also measured against itself (A/A)."""
    timer: TimerKind = TimerKind.CALL
    cache: CacheState = CacheState.WARM
    versions: dict[str, Version] = field(default_factory=dict)
    """The implementations that are states of a source tree, by name."""
    precision: float | None = None
    """Half-width of the 95 % interval, as a share, at which a case is measured no longer; then ``repeats`` is the
    most blocks. None: exactly ``repeats`` blocks."""
    budget_s: float | None = None
    """Time after which no further round of blocks begins."""
    script: Script | None = None
    """That the cases were recorded from, where the suite is of `cudadent42 capture`."""

    @property
    def operation(self) -> str:
        """Its name, of the cases, which share one."""
        return self.cases[0].operation


# ---------------------------------------------------------------- what was found


@dataclass(frozen=True)
class Check:
    """One preflight check."""

    name: str
    status: Status
    detail: str
    """What was found."""
    cause: str = ""
    """Why it is a warning or a failure."""
    fix: str = ""
    """The one command that mends it."""


@dataclass(frozen=True)
class MachineReport:
    checks: tuple[Check, ...]
    summary: str
    """``torch=2.13.0+cpu cuda=none dev=AMD EPYC``."""
    facts: dict[str, str | int | float | bool | None]
    """Machine, versions and clocks, flat, for the manifest."""

    @property
    def ready(self) -> bool:
        return all(check.status is not Status.FAIL for check in self.checks)


@dataclass(frozen=True)
class BuildFailure:
    kernel: str
    architecture: str
    message: str
    log: str = ""


@dataclass(frozen=True)
class BuildReport:
    kernels: tuple[KernelBuild, ...]
    failures: tuple[BuildFailure, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failures


@dataclass(frozen=True)
class ErrorNorms:
    """Error against the float64 reference, relative to the reference's root mean square."""

    max: float
    rms: float
    worst_row: float
    """Largest over the rows of the row's RMS error, relative to that row's own RMS."""


@dataclass(frozen=True)
class Compared:
    """An RMS error, relative to the RMS of what it is an error of, and how large it may be."""

    error: float
    reference_error: float
    """PyTorch's."""
    bound: float

    @property
    def within(self) -> bool:
        return self.error <= self.bound

    @property
    def share(self) -> float:
        """Of the bound."""
        return 0.0 if self.error == 0.0 else self.error / self.bound if self.bound else math.inf


@dataclass(frozen=True)
class PartError:
    """The error of a part of a result that is judged block by block."""

    part: str
    """``w13``: the gradient of that."""
    owner: str
    """What each block belongs to: ``token`` or ``expert``."""
    block: int
    """Of that which is nearest its bound or the furthest over it, its number."""
    of_block: Compared
    of_all: Compared
    """Of all blocks together."""


@dataclass(frozen=True)
class VerifiedCase:
    """One implementation on one input."""

    case: str
    """``Case.id``, or the name of an adversarial input."""
    implementation: str
    input: str
    """``random`` or the kind of adversarial input."""
    error: ErrorNorms | None
    """None where the result is judged by pattern (NaN, infinity, empty), not by size."""
    reference_error: ErrorNorms | None
    """PyTorch's same-dtype error on the same input."""
    bound: ErrorNorms | None
    passed: bool
    detail: str = ""
    parts: tuple[PartError, ...] = ()
    """Where parts are judged apart; ``worst_row`` is then of the block, of all of them, that is nearest its bound."""


class Scope(str, Enum):
    """Which inputs are verified."""

    ALL = "all"
    CASES = "cases"
    """Random ones of a plan's cases, and adversarial ones of their shapes."""
    COMMON = "common"
    """Adversarial ones that depend on no case, but on a dtype alone."""


@dataclass(frozen=True)
class VerifyReport:
    """``verify.json``."""

    cases: tuple[VerifiedCase, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    """What was not verified, with the reason: ``Case.id/implementation`` that the implementation does not
    support, or the name of an implementation that cannot run here."""
    baseline: str = ""
    """Of the plan."""
    findings: tuple[Finding, ...] = ()
    """What else was seen of the implementations while they were loaded and verified."""
    kept_apart: tuple[str, ...] = ()
    """Whose work they run that say so themselves, in words."""

    @property
    def counted(self) -> tuple[VerifiedCase, ...]:
        """Every check but the baseline's passed ones: its bound is twice its own error."""
        return tuple(case for case in self.cases if case.implementation != self.baseline or not case.passed)

    @property
    def passed(self) -> bool:
        return all(case.passed for case in self.cases)


# ---------------------------------------------------------------- what was measured


@dataclass(frozen=True)
class Sample:
    """One timed call (or the mean of ``inner`` calls where one is too short for the clock)."""

    case: str
    """``Case.id``."""
    implementation: str
    """The control's rows carry ``<baseline>_control``."""
    block: int
    """Pairing: all implementations are measured once in each block."""
    position: int
    """Place in the block's random order, from 0."""
    latency_ms: float
    """Per call."""
    inner: int
    """Calls between the two clock readings."""
    memory_mb: float
    """Memory that the call took beyond its inputs, 1e6 bytes; NaN where unknown."""
    timestamp_s: float
    """Since the start of the bench stage."""
    flags: str = ""
    """Disturbances seen in this block (``throttled``, ``preempted``), comma-separated."""


@dataclass(frozen=True)
class Conditions:
    """The machine during one block. NaN where this machine does not tell."""

    case: str
    block: int
    duration_s: float
    involuntary_switches: int
    """Context switches that the kernel forced on the worker's threads."""
    wait_fraction: float
    """Time the worker's threads were ready but not running, per second of the block."""
    steal_fraction: float
    """Processor time that the hypervisor gave to others, as a share of the block."""
    load: float
    """The system's one-minute load average."""
    sm_clock_mhz: float = math.nan
    memory_clock_mhz: float = math.nan
    power_w: float = math.nan
    temperature_c: float = math.nan
    clock_change: float = math.nan
    """The SM clock after the block over that before it, minus 1."""
    throttle_reasons: str = ""
    """The GPU's reasons for not running faster, comma-separated."""


@dataclass(frozen=True)
class BenchReport:
    """What the bench stage hands on."""

    samples: tuple[Sample, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    """Reasons, by ``Case.id`` for a case that nobody was timed on, by ``Case.id/implementation`` for one."""
    rechecked: tuple[VerifiedCase, ...] = ()
    """Output of each implementation's last timed call, verified after timing."""
    conditions: tuple[Conditions, ...] = ()
    findings: tuple[Finding, ...] = ()
    """What was seen of the implementations between the blocks."""
    kept_apart: tuple[str, ...] = ()
    """Settings of their own, in words."""
    measuring: Spent = field(default_factory=Spent)
    """All of the stage, in workers that came to its end."""
    checks: dict[str, Spent] = field(default_factory=dict)
    """Of that, what was spent on looking at the implementations."""
    planning_ms: dict[str, float] = field(default_factory=dict)
    """As ``Results.planning_ms``."""


@dataclass(frozen=True)
class Comparison:
    """One implementation against the baseline on one case."""

    name: str
    """``Case.name``."""
    dtype: str
    implementation: str
    baseline: str
    speedup: float
    """Baseline's latency over the implementation's: the blocks' ratios' centre (``decisions.statistics.centre``)."""
    ci_low: float
    ci_high: float
    """95 % bootstrap interval of ``speedup``."""
    verdict: Verdict
    latency_ms: float
    baseline_latency_ms: float
    blocks: int
    """That count."""
    flagged_blocks: int = 0
    """Blocks with a mark of disturbance."""
    left_out: int = 0
    """Of these, the blocks that do not count (``decisions.compare.undisturbed``)."""
    disturbances: tuple[str, ...] = ()
    """The marks that there were, the most frequent first (``stages.bench.conditions``)."""
    refused: Refusal | None = None
    """Why there is no verdict whatever the interval; None where the interval decided."""
    floor_ms: float = 0.0
    """The least latency that this machine allows (``decisions.floor``); 0 where that was not measured."""

    @property
    def case_id(self) -> str:
        """``Case.id``."""
        return f"{self.name}/{self.dtype}"

    @property
    def saved_ms(self) -> float:
        """Of the baseline's time for a call; below 0 where the implementation takes longer."""
        return self.baseline_latency_ms - self.latency_ms

    @property
    def measured_blocks(self) -> int:
        """Whether they count or not."""
        return self.blocks + self.left_out


@dataclass(frozen=True)
class Results:
    """``results.json``."""

    baseline: str
    candidate: str
    """The implementation whose speed-up is the headline."""
    speedup_geomean: float
    speedup_geomean_ci_low: float
    speedup_geomean_ci_high: float
    verdict: Verdict
    margin: float
    noise_floor: float
    """How far from 1 the A/A control's ratios lie (95th percentile of |ratio - 1|); NaN without control."""
    cases: tuple[Comparison, ...]
    """Of the candidate."""
    others: tuple[Comparison, ...] = ()
    """Of the remaining implementations."""
    control: tuple[Comparison, ...] = ()
    """Of the baseline against itself."""
    skipped: dict[str, str] = field(default_factory=dict)
    """What was not timed, by ``Case.id`` or ``Case.id/implementation``, with the reason."""
    peaks: dict[str, float] = field(default_factory=dict)
    """Ceilings measured in this run: ``fp32_gflops``, ``bf16_gflops``, ``copy_gbps``."""
    detectable_effect: float = math.nan
    """Smallest relative difference that a typical case of this run would have told from none four times out of five;
    to be called faster or slower it has to exceed the margin by as much."""
    refused: Refusal | None = None
    """Why there is no overall verdict whatever the interval: that of a case which the mean contains."""
    rules: int = 0
    """Of deciding, by which these results follow from their samples (``decisions.compare.RULES``); 0 where that was not
    written yet."""
    integrity: Integrity | None = None
    """What was found of the candidates besides their samples; None where nobody looked."""
    claim_allowed: bool = False
    """Whether the result may be quoted (``decisions.claims``)."""
    claim_reason: str = ""
    """Why, or why not."""
    prediction: Prediction | None = None
    """What the recorded script would gain, where the plan has one that ran on such a device."""
    planning_ms: dict[str, float] = field(default_factory=dict)
    """What a step's plan takes, once for all layers and apart from the calls, which are compared without it: by
    ``Case.id/implementation``, of those that have one. A median of several by the timer ``call``."""
