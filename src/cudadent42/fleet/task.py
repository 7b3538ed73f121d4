"""What a fleet is given and what comes back. A block never leaves its device, so a task is whole blocks of a plan."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from cudadent42.base.parcels import Parcel
from cudadent42.model.records import Plan
from cudadent42.model.sandbox import Protection

SCHEMA_VERSION = 1

LIMIT_S = 1800.0
"""A task that takes longer hangs: its worker is ended."""


PATIENCE_S = 600.0
"""Without a sign of life of who hands out tasks, a worker ends."""


class Way(str, Enum):
    RACE = "race"
    """Verify and time, in a process that lives from task to task."""
    RUN = "run"
    """A run with all its checks, in processes of its own."""


@dataclass(frozen=True)
class Checks:
    """Of a task that is a run, as `cudadent42.plan.RunOptions`."""

    audits: bool = True
    sealed: bool = False
    untrusted: bool = False
    accepted_missing: tuple[Protection, ...] = ()
    ignore_preflight: bool = False


@dataclass(frozen=True)
class Right:
    """Implementations that the fleet has verified before, on a device of the same kind, and found right. Who races them
    does not ask that again; the outputs of what it times are judged all the same, and a confirmation verifies
    everything."""

    anywhere: tuple[str, ...] = ()
    """On the inputs of the plan's dtype that depend on no case."""
    on_case: tuple[str, ...] = ()
    """On these and on the plan's case."""


@dataclass(frozen=True)
class Task:
    """One attempt at something. Who takes it puts its own device into the plan."""

    name: str
    attempt: int
    way: Way
    plan: Plan
    run: str
    """Its run folder, relative to the fleet's."""
    worker: str = ""
    """Who is to take it; anybody if empty."""
    suite: str = ""
    """As the user named it, for machines that are told in a command line."""
    checks: Checks = Checks()
    tables: bool = True
    """Whether tables of tuned configurations are asked."""
    limit_s: float = LIMIT_S
    parcels: tuple[Parcel, ...] = ()
    """Files of the plan's implementations that were sent to whoever does not see the coordinator's disk."""
    right: Right = Right()
    """Of a race."""
    schema_version: int = SCHEMA_VERSION

    @cached_property
    def key(self) -> str:
        """Of this attempt; a file's name."""
        digest = hashlib.sha256(self.name.encode()).hexdigest()[:8]
        return f"{plain_name(self.name)[:100]}-{digest}-{self.attempt}"


_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]")


def plain_name(text: str) -> str:
    """As part of a file's name."""
    return _UNUSUAL.sub("-", text)


@dataclass(frozen=True)
class Block:
    """A whole block of a race."""

    number: int
    latencies_ms: dict[str, float]
    """By implementation."""
    flags: str = ""


@dataclass(frozen=True)
class Worker:
    """Who takes tasks: one process, one device."""

    name: str
    host: str
    device: str
    """``cpu`` or ``cuda:N``, as its host calls it."""
    kind: str
    """As PyTorch names a GPU; the model of a CPU."""
    unit: str
    """The piece of hardware: a GPU's UUID, or the host with its device."""
    tree: str
    """Digest of the project's sources there."""
    driver: str = ""
    ready: bool = True
    trouble: str = ""
    """Why preflight failed."""
    up_s: float = 0.0
    """That its process had run when it was ready for tasks: it was paid for by then."""


@dataclass(frozen=True)
class Returned:
    """A task that ended."""

    key: str
    worker: str
    seconds: float
    """That it held the device."""
    blocks: tuple[Block, ...] = ()
    """Of a race."""
    unfit: dict[str, str] | None = None
    """Implementations that cannot be raced on the case, with the reason; the case's id stands for all."""
    error: str = ""
    lost: bool = False
    """Its worker is gone, which need not be the task's fault."""
    unwritable: bool = False
    """Its machine's disk took no more, which is no implementation's fault."""
    right: tuple[str, ...] = ()
    """Of a race, the implementations that are right on its case and on the inputs that depend on none."""
    begun: bool = True
    """False of a task for a worker that went before it took it."""
    parcels: tuple[Parcel, ...] = ()
    """What was raced of what was sent, read and compared with its digests there."""
    schema_version: int = SCHEMA_VERSION
