"""What a profile found (``profile.json``) and what follows from it (``diagnosis.json``)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from flashmoe_science.jit.records import Resources

SCHEMA_VERSION = 1
"""Of both files."""

PROFILE = "profile.json"
DIAGNOSIS = "diagnosis.json"


class Source(str, Enum):
    """What a profile rests on."""

    COUNTERS = "counters"
    """The GPU's performance counters, read by Nsight Compute."""
    MODEL = "model"
    """Times, ceilings, resource tables and the compiled instructions: no counters."""


class Certainty(str, Enum):
    """How well a finding is known."""

    MEASURED = "measured"
    """By counters of this launch, or by taking the part out and timing what is left."""
    INFERRED = "inferred"
    """From times, shapes and ceilings, by a model."""
    SUSPECTED = "suspected"
    """From the compiled kernel alone: it is there, and what it costs is not known."""


class Kind(str, Enum):
    CAUSE = "cause"
    """Something that can be mended."""
    SYMPTOM = "symptom"
    """Where the time goes, which several causes may explain: below a cause that gives as much."""
    UNEXPLAINED = "unexplained"
    """Time that nothing accounts for: below all that has a name."""
    LIMIT = "limit"
    """What holds even a good kernel back. Said, not counted among the causes."""


class Clock(str, Enum):
    """How the time of a call was measured: not the same conditions, so not the same time."""

    COUNTED = "counted"
    """Of a call's only kernel, by Nsight Compute: it runs alone, on a chip that was idle before."""
    TRACED = "traced"
    """Of all kernels of a call, by the driver's trace: without the time between them."""
    CALLED = "called"
    """Of the whole call, from before its launch to its end, as runs time it."""
    ABLATED = "ablated"
    """The same, in the race with kernels that lack a part."""
    RUN = "run"
    """The same, in the run whose folder it is."""


@dataclass(frozen=True)
class MeasuredTime:
    clock: Clock
    latency_ms: float
    judged: bool
    """Whether rates and shares rest on this one."""


@dataclass(frozen=True)
class Launch:
    """One kernel of the profiled call, by the driver's own trace."""

    kernel: str
    duration_s: float
    grid_blocks: int
    block_threads: int
    registers: int
    shared_bytes: int
    """Static and dynamic, of one block."""


@dataclass(frozen=True)
class Ablation:
    """The kernel with a part of its work taken out, to see what it costs: wrong on purpose, or with fewer gradients."""

    part: str
    """``exponentials``, ``mask``, ``loads``; of a backward pass gradients, such as ``weight_gradients``."""
    latency_ms: float
    baseline_ms: float
    saved: float
    """Share of the baseline's time that went away, 0 to 1; the part's exposed cost."""
    saved_low: float
    saved_high: float
    """95 % interval of ``saved``."""


@dataclass(frozen=True)
class Profile:
    """Everything that is known of one call of one implementation on one case."""

    schema_version: int
    case: str
    """``Case.id``."""
    implementation: str
    device: str
    """``cpu`` or ``cuda:N``."""
    device_name: str
    architecture: str
    """``sm_90``; the instruction set on a CPU."""
    kernel: str
    """The function that takes most of the call's time; empty on a CPU."""
    source: Source
    flops: float
    """Counted from the case, NaN where it counts none."""
    bytes_min: float
    """Fewest bytes to move."""
    dtype: str
    latency_ms: float
    """Of the call without a profiler; NaN where it was not timed."""
    metrics: dict[str, float]
    """By the names of ``metrics`` and ``quantities`` here: fractions of one, seconds, bytes, hertz, counts."""
    missing: dict[str, str] = field(default_factory=dict)
    """Metrics that were asked for and not obtained, with the reason. Never zero instead."""
    peaks: dict[str, float] = field(default_factory=dict)
    """Ceilings measured on this machine: ``bf16_gflops``, ``copy_gbps`` and so on."""
    resources: Resources | None = None
    instructions: dict[str, int] = field(default_factory=dict)
    """Of the compiled kernel, by kind, counted where they stand (not as often as they run)."""
    launches: tuple[Launch, ...] = ()
    ablations: tuple[Ablation, ...] = ()
    notes: tuple[str, ...] = ()
    """Why something was not done, and what would help."""
    report: str = ""
    """Nsight Compute's report in the same folder."""
    tool: str = ""
    revision: str = ""
    """Of the source tree that was measured, shortened, with ``-dirty``; empty where it is not known."""
    run_revision: str = ""
    """Of the run in whose folder the profile is, where that was made before."""
    run_latency_ms: float | None = None
    """Of the call, in that run."""


@dataclass(frozen=True)
class Finding:
    """One rule that spoke."""

    rule: str
    title: str
    kind: Kind
    evidence: str
    meaning: str
    experiment: str
    """The one to try first."""
    gain: float
    """The most that mending it could give, as a share of the time, 0 to 1. An upper bound, not a forecast."""
    certainty: Certainty

    @property
    def speedup(self) -> float:
        """The same bound as a factor."""
        return 1 / (1 - self.gain) if self.gain < 1 else math.inf


@dataclass(frozen=True)
class Threshold:
    """One value that is wanted on one side of a limit."""

    name: str
    value: float
    """NaN: not known."""
    wanted: str
    """``< 5 %``."""
    met: bool | None
    """None where the value is not known or the wish does not apply, for the reason in ``note``."""
    note: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What follows from a profile."""

    schema_version: int
    case: str
    implementation: str
    kernel: str
    source: Source
    bound: str
    """What the kernel runs against: ``matrix products``, ``memory``, ``latency``, ``idle multiprocessors``..."""
    bound_share: float
    """How busy that is, 0 to 1; NaN where not known."""
    summary: str
    causes: tuple[Finding, ...]
    """Best first; what could give less than ``diagnose.WORTH`` is under ``minor``."""
    minor: tuple[Finding, ...]
    limits: tuple[Finding, ...]
    thresholds: tuple[Threshold, ...]
    not_examined: dict[str, str]
    """Rules that could not be asked, with the metric that is missing."""
    next_step: str
    notes: tuple[str, ...] = ()
    rules: int = 0
    """How many rules there are; 0 in files from before this was kept."""
    times: tuple[MeasuredTime, ...] = ()
    ablations: tuple[Ablation, ...] = ()
