"""What was found of a candidate that a number must not rest on, and what confirms a number."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Breach(str, Enum):
    """What a finding is about. docs/defences.md says of each how it is seen, and what clears it."""

    KEPT_RESULT = "kept result"
    WRONG_WHILE_TIMED = "wrong while timed"
    LATE_WORK = "late work"
    CHANGED_INPUTS = "changed its inputs"
    REPLACED_FUNCTION = "replaced function"
    LEFT_SETTINGS = "left settings changed"
    BACKGROUND_WORK = "background work"
    CLOCKS_DISAGREE = "clocks disagree"
    UNJOINED_WORK = "unjoined work"
    BASELINE_SLOWED = "baseline slowed"
    FAST_ONLY_IN_RUN = "fast only in the run"
    HIDDEN_SHAPE = "wrong for shapes not in the plan"
    ANOTHER_NAME = "another's work under its name"
    AUDIT_DIED = "died in the audit"


class Grade(str, Enum):
    SUSPECT = "suspect"
    """There may be an honest reason; the finding says what would clear it."""
    FAILED = "failed"
    """No honest code does this."""


class Way(str, Enum):
    """How the calls of an audit's turn are made (docs/defences.md)."""

    SHARED = "shared"
    """Inputs and outputs in shared memory, one slot a call. On the CPU."""
    ALONE = "alone"
    """Inputs drawn on the device from the run's seed; each call on an idle stream, as the timer ``call`` has it."""
    QUEUED = "queued"
    """The same, launched without waiting."""
    GRAPH = "graph"
    """The same, all calls in one CUDA graph: time of the GPU, whatever launching takes."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found."""

    breach: Breach
    grade: Grade
    implementation: str
    """Whose; several, comma-separated, where it cannot be told."""
    case: str
    """``Case.id``; empty where it is about none."""
    evidence: str
    """What was seen, with figures."""
    clears: str = ""
    """What would clear a suspect."""

    @property
    def line(self) -> str:
        """In one line."""
        where = f" on {self.case}" if self.case else ""
        line = f"{self.breach.value} ({self.grade.value}): {self.implementation}{where}: {self.evidence}"
        return f"{line}. To clear it: {self.clears}" if self.clears else line


@dataclass(frozen=True)
class Spent:
    """What something took."""

    processor_s: float = 0.0
    """Seconds that threads were running, of all processes that it needs."""
    wall_s: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.processor_s + other.processor_s, self.wall_s + other.wall_s)


@dataclass(frozen=True)
class Confirmation:
    """One case as the audit saw it: processes apart, inputs of its own for every call, the parent's clock."""

    case: str
    """``Case.id``."""
    implementation: str
    saved_ms: float
    """Baseline's time of a call less the implementation's."""
    ci_low_ms: float
    ci_high_ms: float
    """95 % interval of ``saved_ms``."""
    latency_ms: float
    baseline_latency_ms: float
    blocks: int
    calls_checked: int
    """Outputs that the parent compared with its own reference."""
    confirmed: bool
    way: Way = Way.SHARED
    """How both sides' calls were made."""
    calls_compared: int = 0
    """Outputs that were compared with the baseline's of the same inputs: all of the blocks."""
    comparable: bool = True
    """Whether the audit's clock shows what the run's did: the baseline takes about the same in both."""


_SAYS_SO = ", as it says itself"


def peer_note(implementation: str, peer: str, evidence: str) -> str:
    """The note on an implementation that runs another's work and says whose."""
    return f"{implementation} runs the work of {peer}{_SAYS_SO}: {evidence}"


def peer_in(notes: tuple[str, ...], implementation: str) -> str:
    """Whose work it runs, by these notes; empty where they do not say."""
    begins = f"{implementation} runs the work of "
    own = (note.removeprefix(begins) for note in notes if note.startswith(begins))
    return next((note.partition(_SAYS_SO)[0] for note in own), "")


@dataclass(frozen=True)
class Integrity:
    """What the checks of a run came to."""

    findings: tuple[Finding, ...] = ()
    confirmations: tuple[Confirmation, ...] = ()
    hidden_checked: int = 0
    """Results of shapes that are not in the plan, which the parent compared with its own reference."""
    sealed: bool = False
    drawn_by_gain: bool = False
    """Whether the audited cases were drawn by what they gain; in older runs all were as likely."""
    highest_first: bool = False
    """Whether the case with the highest speed-up was audited ahead of those that were drawn."""
    short_ms: float = 0.0
    """A saving of a call that counts as none in a claim where it is smaller and not confirmed: the audit of a CPU
    cannot tell it. 0 where there is no such rule: on a GPU, and in older runs."""
    why_not_audited: str = ""
    """Of a run that would have needed it."""
    notes: tuple[str, ...] = field(default=())
    """What was kept apart and is no offence, such as settings of PyTorch that a plug-in chose for itself."""
    measuring: Spent = field(default_factory=Spent)
    """The bench stage with the checks inside it, in the worker."""
    checks: dict[str, Spent] = field(default_factory=dict)
    """By check, what it took; ``audit`` is the one that runs outside of the bench stage."""

    @property
    def sound(self) -> bool:
        return not self.findings
