"""The engine behind a shared folder: workers come by themselves, from wherever they were started."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cudadent42.base.parcels import Parcel
from cudadent42.fleet.engine import Alive, Claimed, Joined, Left, Message
from cudadent42.fleet.queue import Queue
from cudadent42.fleet.task import Task
from cudadent42.model.records import Plan

FOLDER = "fleet"
"""Of the queue, in the folder of the work."""

_POLL_S = 0.05
_TOUCH_S = 1.0


class FolderEngine:
    """An `Engine`."""

    def __init__(self, root: Path) -> None:
        """``root``: the folder that tasks' run folders are in."""
        self.queue = Queue(root / FOLDER)
        self.queue.open()
        self._workers: dict[str, int] = {}
        self._claims: dict[str, str] = {}
        self._touched_s = 0.0

    def parcels(self, plan: Plan) -> tuple[Parcel, ...]:
        return ()  # the folder's disk is that of all workers

    def offer(self, task: Task) -> None:
        self.queue.offer(task)

    def withdraw(self, key: str) -> bool:
        return self.queue.withdraw(key)

    def held(self) -> Mapping[str, str]:
        return {**self.queue.waiting(), **self.queue.claims()}

    def wait(self, seconds: float) -> Sequence[Message]:
        self.queue.acknowledge()
        until_s = time.monotonic() + seconds
        messages: list[Message] = []
        while True:
            messages += self._look()
            left_s = until_s - time.monotonic()
            if left_s <= 0 or any(not isinstance(message, Alive) for message in messages):
                return messages
            time.sleep(min(_POLL_S, left_s))

    def _look(self) -> list[Message]:
        now_s = time.monotonic()
        if now_s - self._touched_s >= _TOUCH_S:
            self._touched_s = now_s
            self.queue.touch()
        messages: list[Message] = []
        times = self.queue.workers()
        for name, seen in times.items():
            if name not in self._workers:
                worker = self.queue.worker(name)
                if worker is None:
                    continue
                messages.append(Joined(worker))
            elif self._workers[name] != seen:
                messages.append(Alive(name))
            self._workers[name] = seen
        claims = self.queue.claims()
        messages += [Claimed(key, name) for key, name in claims.items() if key not in self._claims]
        self._claims = claims
        messages += self.queue.returned()
        for name in self._workers.keys() - times.keys():
            del self._workers[name]
            messages.append(Left(name, "it ended"))
        return messages

    def admit(self, worker: str) -> None:
        self.queue.admit(worker)

    def dismiss(self, worker: str) -> None:
        self.queue.dismiss(worker)

    def close(self) -> None:
        self.queue.close()
