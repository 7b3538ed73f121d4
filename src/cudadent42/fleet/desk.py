"""Who is admitted, who holds which task, and since when: tasks go out, what became of them comes back.

Leases are kept by this process's own clock. A task whose worker gave no sign of life is lost: what comes back of it
later is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from cudadent42.fleet.engine import Alive, Claimed, Engine, Joined, Left
from cudadent42.fleet.task import Returned, Task, Worker

LEASE_S = 30.0
"""Without a sign of life; workers give one every `HEARTBEAT_S`."""

HEARTBEAT_S = 2.0


@dataclass(frozen=True)
class Admitted:
    worker: Worker


@dataclass(frozen=True)
class Refused:
    worker: Worker
    reason: str


@dataclass(frozen=True)
class Gone:
    worker: str
    reason: str


Change = Admitted | Refused | Gone | Returned


@dataclass
class _Member:
    worker: Worker
    heard_s: float


@dataclass
class _InPlay:
    task: Task
    worker: str = ""
    since_s: float = 0.0


class Desk:
    """One for one engine."""

    def __init__(
        self, engine: Engine, admits: Callable[[Worker], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``admits``: why a worker is not to be had; empty where it is."""
        self._engine = engine
        self._admits = admits
        self._clock = clock
        self._members: dict[str, _Member] = {}
        self._staying: dict[str, Worker] = {}
        """Members that may get a further task."""
        self._in_play: dict[str, _InPlay] = {}
        self._held: dict[str, str] = {}
        self._looked_s = clock()
        self._addressed = 0

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._staying.values())

    @property
    def staying(self) -> int:
        """How many they are."""
        return len(self._staying)

    @property
    def in_play(self) -> int:
        """Tasks that are offered or held."""
        return len(self._in_play)

    @property
    def for_anybody(self) -> int:
        """Of these, the ones that are not for a certain worker."""
        return len(self._in_play) - self._addressed

    @property
    def held(self) -> int:
        """Tasks that a worker is at."""
        return len(self._held)

    def offer(self, task: Task) -> None:
        self._in_play[task.key] = _InPlay(task)
        self._addressed += bool(task.worker)
        self._engine.offer(task)

    def expect(self, task: Task, worker: str) -> None:
        """A task that a worker has held since before this process began."""
        self._in_play[task.key] = _InPlay(task, worker, self._clock())
        self._held[worker] = task.key

    def withdraw(self) -> tuple[Task, ...]:
        """All that nobody has claimed."""
        free = [
            each.task for key, each in self._in_play.items() if not each.worker and self._engine.withdraw(key)
        ]
        for task in free:
            self._take_out(task.key)
        return tuple(free)

    def dismiss(self, name: str) -> None:
        """A worker that gets no further task; what it is at still counts. What it alone was to take comes back as
        lost once it is gone."""
        self._engine.dismiss(name)
        self._staying.pop(name, None)

    def turn(self, wait_s: float) -> list[Change]:
        """What changed, within this time. Raises LabError where no worker can ever come."""
        changes: list[Change] = []
        for message in self._engine.wait(wait_s):
            if isinstance(message, Joined):
                changes.append(self._join(message.worker))
            elif isinstance(message, Alive):
                self._heard(message.worker)
            elif isinstance(message, Claimed):
                self._claimed(message)
            elif isinstance(message, Left):
                changes += self._gone(message.worker, message.reason)
            else:
                changes += self._returned(message)
        return changes + self._expired()

    def _join(self, worker: Worker) -> Change:
        reason = worker.trouble if not worker.ready else self._admits(worker)
        if reason:
            self._engine.dismiss(worker.name)
            return Refused(worker, reason)
        self._members[worker.name] = _Member(worker, self._clock())
        self._staying[worker.name] = worker
        self._engine.admit(worker.name)
        return Admitted(worker)

    def _heard(self, name: str) -> None:
        if name in self._members:
            self._members[name].heard_s = self._clock()

    def _claimed(self, message: Claimed) -> None:
        self._heard(message.worker)
        play = self._in_play.get(message.key)
        if play is not None:
            play.worker, play.since_s = message.worker, self._clock()
            self._held[message.worker] = message.key

    def _returned(self, record: Returned) -> list[Change]:
        play = self._take_out(record.key)
        if play is not None and not record.worker:  # it could not be read, but the claim says whose it is
            record = replace(record, worker=play.worker)
        if play is not None and not record.error and record.parcels != play.task.parcels:
            record = replace(
                record, error="it does not say that it raced the files that were sent", blocks=()
            )
        self._heard(record.worker)
        if self._held.get(record.worker) == record.key:
            del self._held[record.worker]
        return [] if play is None else [record]  # else of an attempt that was given up, or told twice

    def _gone(self, name: str, reason: str) -> list[Change]:
        changes: list[Change] = []
        self._staying.pop(name, None)
        if self._members.pop(name, None) is not None:
            changes.append(Gone(name, reason))
        key = self._held.pop(name, "")
        play = self._take_out(key)
        if play is not None:
            seconds = self._clock() - play.since_s
            changes.append(Returned(key, name, seconds, error=f"its worker is gone: {reason}", lost=True))
        for key, play in list(self._in_play.items()) if self._addressed else ():
            if play.task.worker == name and not play.worker and self._engine.withdraw(key):
                self._take_out(key)
                error = f"its worker is gone: {reason}"
                changes.append(Returned(key, name, 0.0, error=error, lost=True, begun=False))
        return changes

    def _take_out(self, key: str) -> _InPlay | None:
        play = self._in_play.pop(key, None)
        self._addressed -= play is not None and bool(play.task.worker)
        return play

    def _expired(self) -> list[Change]:
        now_s = self._clock()
        if now_s - self._looked_s < LEASE_S / 6:
            return []
        self._looked_s = now_s
        changes: list[Change] = []
        for name, member in list(self._members.items()):
            play = self._in_play.get(self._held.get(name, ""))
            if now_s - member.heard_s > LEASE_S:
                reason = f"no sign of life for {LEASE_S:.0f} s"
            elif play is not None and now_s - play.since_s > play.task.limit_s + LEASE_S:
                reason = f"one task took more than {play.task.limit_s:.0f} s"
            else:
                continue
            self._engine.dismiss(name)
            changes += self._gone(name, reason)
        return changes
