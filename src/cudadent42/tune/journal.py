"""What happens in a tuning, one record a kind. The journal of them is the tuning; all else is derived from it.

    tuning.json     what it is about
    journal.jsonl   each event, on the disk before the next step begins
    arms/  races/  confirmed/  report.html

Every block is written when it was measured, so that a process that is killed loses no more than the block it was in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, get_args

from cudadent42.base import journal as base
from cudadent42.base.errors import UsageError
from cudadent42.base.files import read_record
from cudadent42.base.serialise import Tagged
from cudadent42.decisions.racing import Leaving, Rules
from cudadent42.model.cases import Case
from cudadent42.model.records import Plan, Verdict
from cudadent42.tune.prune import CompiledArm, Target

SCHEMA_VERSION = 1

FILES = base.Files("tuning.json", "journal.jsonl", "spaces, kernels, cases, devices or options")

ARMS_OF_A_JOB = 6
"""That share its blocks with the default: more make blocks long, and what they have in common short."""


@dataclass(frozen=True)
class Device:
    """What a configuration is chosen for."""

    name: str
    """As PyTorch names a GPU; the model of a CPU."""
    multiprocessors: int = 0


@dataclass(frozen=True)
class Search:
    """How many configurations are proposed where there are too many to race each."""

    round: int = 24
    """Proposed at a time,"""
    rounds: int = 16
    """so often at most,"""
    stale: int = 3
    """and until so many rounds, one after the other, brought no case anything better."""


@dataclass(frozen=True)
class Setup:
    """What a tuning is about; fixed at its start."""

    schema_version: int
    version: str
    """Of cudadent42."""
    space: str
    """Its file."""
    space_digest: str
    kernel: str
    """As the table of tuned configurations names it: ``attention.portable``, or a kernel's file."""
    kernel_digest: str
    """SHA-256 of what the kernel is compiled from."""
    arms: dict[str, str]
    """The implementation of each, by its name, the default first. Of a search the default alone; a state's setup has
    those too that were proposed since."""
    settings: dict[str, dict[str, int | bool | str]]
    """Of each arm but the default."""
    regions: tuple[str, ...]
    plan: Plan
    """Of a race of the default: cases, device, timer, seed."""
    rules: Rules
    target: Target
    device: Device
    search: Search | None = None
    """None where every configuration is raced."""

    @cached_property
    def case_of(self) -> Mapping[str, Case]:
        """The plan's cases by ``Case.id``: a fleet asks for one with each job."""
        return {case.id: case for case in self.plan.cases}


@dataclass(frozen=True)
class Opened:
    """A process begins, or goes on with the tuning."""

    event: ClassVar[str] = "opened"
    host: str
    usd_per_hour: float = 0.0


@dataclass(frozen=True)
class Compiled:
    event: ClassVar[str] = "compiled"
    result: CompiledArm


@dataclass(frozen=True)
class Proposed:
    """A round of a search: configurations that are to be raced too."""

    event: ClassVar[str] = "proposed"
    round: int
    """From 1 on."""
    by: str
    """``optuna 5.0.0``."""
    arms: dict[str, str]
    """As of `Setup`."""
    settings: dict[str, dict[str, int | bool | str]]


@dataclass(frozen=True)
class Searched:
    """A search is over: of what was proposed, the best are raced on."""

    event: ClassVar[str] = "searched"
    reason: str


@dataclass(frozen=True)
class JobStarted:
    """Blocks of some arms, beside the default, on one case."""

    event: ClassVar[str] = "job-started"
    job: str
    attempt: int
    case: str
    arms: tuple[str, ...]
    seed: int
    run: str
    """Its run folder, relative to the tuning's."""


@dataclass(frozen=True)
class BlockMeasured:
    """A whole block."""

    event: ClassVar[str] = "block"
    job: str
    attempt: int
    block: int
    latencies_ms: dict[str, float]
    """By arm."""
    flags: str = ""
    """What disturbed it, as of samples."""


@dataclass(frozen=True)
class JobReturned:
    """What a worker of a fleet measured of a job: whole blocks, and how it ended."""

    event: ClassVar[str] = "job-returned"
    job: str
    attempt: int
    worker: str
    arms: tuple[str, ...]
    """The default first."""
    blocks: tuple[tuple[float, ...], ...]
    """Latencies in ms by arm; 0 where an arm has none."""
    unfit: dict[str, str]
    """Arms that cannot be raced on the case, with the reason."""
    seconds: float
    """That it held the device."""
    error: str = ""
    lost: bool = False
    """The worker is gone."""


@dataclass(frozen=True)
class Joined:
    """A worker is taken on."""

    event: ClassVar[str] = "joined"
    worker: str
    unit: str
    """The piece of hardware."""
    kind: str
    host: str
    driver: str = ""
    up_s: float = 0.0
    """That it was paid for before."""


@dataclass(frozen=True)
class Gone:
    """A worker is there no longer."""

    event: ClassVar[str] = "gone"
    worker: str
    reason: str


@dataclass(frozen=True)
class Quarantined:
    """A device that is not to be trusted: it gets no further job, and what it confirmed does not count."""

    event: ClassVar[str] = "quarantined"
    unit: str
    reason: str


@dataclass(frozen=True)
class MachineConfirmed:
    """What the fresh race of a winner came to on one machine of a fleet."""

    event: ClassVar[str] = "machine-confirmed"
    case: str
    arm: str
    attempt: int
    worker: str
    unit: str
    run: str
    ratio: float
    low: float
    high: float
    verdict: Verdict
    holds: bool
    reason: str
    default_ms: float = 0.0
    """Median latency of the default: how this machine compares with others of its kind."""


@dataclass(frozen=True)
class ConfirmationFailed:
    """A confirmation, or a machine of a fleet at one, that came to no answer."""

    event: ClassVar[str] = "confirmation-failed"
    case: str
    worker: str
    """Of a fleet; else empty."""
    reason: str
    lost: bool = False
    """The worker is gone, which need not be the winner's fault."""


@dataclass(frozen=True)
class ArmOut:
    """An arm that cannot be raced on a case: wrong, or it took a worker along."""

    event: ClassVar[str] = "arm-out"
    case: str
    arm: str
    reason: str


@dataclass(frozen=True)
class JobEnded:
    event: ClassVar[str] = "job-ended"
    job: str
    attempt: int
    error: str = ""


@dataclass(frozen=True)
class RungDone:
    """After a rung of a case: who leads, and who left."""

    event: ClassVar[str] = "rung"
    case: str
    rung: int
    leader: str
    left: tuple[Leaving, ...]


@dataclass(frozen=True)
class Settled:
    """The race of a case is over."""

    event: ClassVar[str] = "settled"
    case: str
    leader: str
    unseparated: tuple[str, ...]
    """Arms that may be as fast as the leader."""
    reason: str
    blocks: int = 54
    """Of each confirmation of the leader. Journals from before they were sized do not say it, and had these."""


@dataclass(frozen=True)
class ConfirmationStarted:
    event: ClassVar[str] = "confirmation-started"
    case: str
    arm: str
    attempt: int
    run: str


@dataclass(frozen=True)
class Confirmed:
    """What a fresh race of the winner against the default came to."""

    event: ClassVar[str] = "confirmed"
    case: str
    arm: str
    attempt: int
    run: str
    ratio: float
    low: float
    high: float
    verdict: Verdict
    holds: bool
    """Whether it may be installed."""
    reason: str
    machines: int = 1
    """That were asked. With two or three, all have to agree; from four on the interval is for the kind of device."""
    evidence: tuple[str, ...] = ()
    """Run folders of all machines; empty where ``run`` is the only one."""


@dataclass(frozen=True)
class Paused:
    """A process ended before the tuning did."""

    event: ClassVar[str] = "paused"
    reason: str


@dataclass(frozen=True)
class Sent:
    """Kernels in files go to workers that do not see this machine's disk: what of each, from now on."""

    event: ClassVar[str] = "sent"
    files: dict[str, str]
    """By arm, the SHA-256 over the names and contents of its files."""


@dataclass(frozen=True)
class Installed:
    event: ClassVar[str] = "installed"
    table: str
    entries: int


Event = (
    Opened
    | Proposed
    | Searched
    | Compiled
    | JobStarted
    | BlockMeasured
    | ArmOut
    | JobEnded
    | RungDone
    | Settled
    | JobReturned
    | Joined
    | Gone
    | Quarantined
    | Sent
    | ConfirmationStarted
    | MachineConfirmed
    | ConfirmationFailed
    | Confirmed
    | Paused
    | Installed
)

_KINDS: Mapping[str, type[Any]] = {kind.event: kind for kind in get_args(Event)}


def _kind(name: str) -> type[Any]:
    if name not in _KINDS:
        raise ValueError(f"{name!r} is none of {', '.join(_KINDS)}; a newer cudadent42 may have written it")
    return _KINDS[name]


_TAGGED = Tagged("event", _kind, lambda fields: "", lambda: tuple(_KINDS))


@dataclass(frozen=True)
class Entry:
    """A line of the journal."""

    time: str
    """UTC, ISO 8601."""
    elapsed_s: float
    """Since this process opened the tuning, by a clock that does not jump."""
    event: Any = field(metadata=_TAGGED.metadata)


class TuningJournal:
    """The journal, open for appending. A context manager; one process at a time."""

    def __init__(self, folder: Path, setup: Setup, clock: Callable[[], float] | None = None) -> None:
        """Opens the folder, or makes it. Raises UsageError where it is about something else, or in use."""
        self._journal: base.Journal[Setup, Entry] = base.Journal(
            folder, FILES, setup, Setup, Entry, keeps=False
        )
        self._clock = clock or time.monotonic
        self._began_s = self._clock()

    def __enter__(self) -> TuningJournal:
        self._journal.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.__exit__(kind, error, trace)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """That were there when it was opened."""
        return self._journal.entries

    @property
    def elapsed_s(self) -> float:
        """Since this process opened the tuning."""
        return round(self._clock() - self._began_s, 3)

    def append(self, event: Event) -> Entry:
        """On the disk when this returns. Raises UnwritableError, with the journal as it was, where that fails."""
        return self.extend((event,))[0]

    def extend(self, events: Iterable[Event]) -> tuple[Entry, ...]:
        """All of them, in one write. A kill leaves the first some."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        elapsed_s = self.elapsed_s
        entries = tuple(Entry(now, elapsed_s, event) for event in events)
        self._journal.extend(entries)
        return entries


def read_setup(folder: Path) -> Setup:
    """What a tuning is about. Raises UsageError where the folder holds none."""
    setup = read_record(Setup, folder / FILES.setup, SCHEMA_VERSION)
    if setup is None:
        raise UsageError(f"{folder} holds no tuning; `cudadent42 tune SPACE.toml` begins one")
    return setup


def read(folder: Path) -> tuple[Setup, tuple[Entry, ...]]:
    """A tuning, also while it goes on."""
    return read_setup(folder), tuple(base.read_entries(folder / FILES.entries, Entry))
