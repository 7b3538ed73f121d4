"""What reaches workers: the one protocol that processes, Slurm, Ray and SSH stand behind. An engine decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cudadent42.base.parcels import Parcel
from cudadent42.fleet.task import Returned, Task, Worker
from cudadent42.model.records import Plan


@dataclass(frozen=True)
class Joined:
    """A worker is there. Told once for each."""

    worker: Worker


@dataclass(frozen=True)
class Left:
    worker: str
    reason: str


@dataclass(frozen=True)
class Claimed:
    """A worker has begun a task."""

    key: str
    worker: str


@dataclass(frozen=True)
class Alive:
    """A sign of life. Whoever gives none for `desk.LEASE_S` has lost its task."""

    worker: str


Message = Joined | Left | Claimed | Alive | Returned


class Engine(Protocol):
    def parcels(self, plan: Plan) -> tuple[Parcel, ...]:
        """What of the plan's implementations is sent along with a task; nothing where workers see this machine's disk.

        Raises UsageError where files cannot be read.
        """
        ...

    def offer(self, task: Task) -> None:
        """To the worker that the task names, or whoever claims it first. Each attempt is offered once."""
        ...

    def withdraw(self, key: str) -> bool:
        """Take back what nobody has claimed; False where somebody has."""
        ...

    def held(self) -> Mapping[str, str]:
        """Tasks of a former coordinator that workers are still at, or have returned meanwhile: who, by key."""
        ...

    def wait(self, seconds: float) -> Sequence[Message]:
        """What happened, as soon as something has. Raises LabError where no worker can ever come.

        The next call says that what this one told is on record: until then, a result is kept for another coordinator.
        """
        ...

    def admit(self, worker: str) -> None:
        """It may claim tasks. Before, it gets none: its sources or its device may be others."""
        ...

    def dismiss(self, worker: str) -> None:
        """It is to end after its task, and gets no other."""
        ...

    def close(self) -> None:
        """No worker of this engine runs when this returns, or will be begun. Tasks that go on are lost."""
        ...
