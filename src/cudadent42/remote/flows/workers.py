"""SSH: every device of the machines that the user has named is a worker, for as long as a connection lasts.

The working tree is sent as for a run there, and kernels in files with the tasks that race them. What is lost with a
connection is lost as with a worker: its tasks are for others, and it joins again once the machine answers.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from cudadent42.base.errors import LabError
from cudadent42.base.parcels import Parcel
from cudadent42.fleet.cargo import Cargo
from cudadent42.fleet.engine import Alive, Claimed, Joined, Left, Message
from cudadent42.fleet.packing import place
from cudadent42.fleet.relay import Admit, Dismiss, Offer, Said, Sent
from cudadent42.fleet.task import Returned, Task, Worker, plain_name
from cudadent42.model.records import Plan
from cudadent42.remote.core.run import working_tree
from cudadent42.remote.flows.line import Arrivals, Device, Host

_CLOSE_S = 20.0


@dataclass
class _Member:
    host: Host
    there: str
    """What it is called on its machine."""
    admitted: bool = False
    dismissed: bool = False
    task: Task | None = field(default=None)


class SshEngine:
    """An `Engine`."""

    def __init__(self, root: Path, names: Sequence[str], device: Device) -> None:
        """Raises UsageError for names that nobody has given to a machine, or where no working tree can be sent."""
        self._root = root
        self._heard: Arrivals = queue.Queue()
        self._hosts = [Host(name, device, self._heard) for name in names]
        self._members: dict[str, _Member] = {}
        self._offers: list[Task] = []
        self._cargo = Cargo()
        self._sent: dict[Host, set[Parcel]] = {host: set() for host in self._hosts}
        """Over the connection that there is."""
        tree = working_tree()
        for host in self._hosts:
            host.begin(tree)

    def parcels(self, plan: Plan) -> tuple[Parcel, ...]:
        return self._cargo.of(plan)

    def offer(self, task: Task) -> None:
        self._offers.append(task)

    def withdraw(self, key: str) -> bool:
        before = len(self._offers)
        self._offers = [task for task in self._offers if task.key != key]
        return len(self._offers) < before

    def held(self) -> Mapping[str, str]:
        return {}  # workers end with who began them

    def wait(self, seconds: float) -> Sequence[Message]:
        messages = self._hand_out()
        until_s = time.monotonic() + seconds
        while True:
            try:
                arrived = [self._heard.get(timeout=max(0.0, until_s - time.monotonic()))]
            except queue.Empty:
                break
            with suppress(queue.Empty):
                while True:
                    arrived.append(self._heard.get_nowait())
            for host, said, packed in arrived:
                messages += (
                    self._lost(host, said) if isinstance(said, LabError) else self._said(host, said, packed)
                )
            if any(not isinstance(message, Alive) for message in messages):
                break
        return messages

    def _hand_out(self) -> list[Message]:
        messages: list[Message] = []
        for name, member in self._members.items():
            if member.task is not None or member.dismissed or not member.admitted:
                continue
            task = next((task for task in self._offers if task.worker in ("", name)), None)
            if task is not None:
                self._offers.remove(task)
                member.task = task
                for parcel in task.parcels:
                    if parcel not in self._sent[member.host]:
                        self._sent[member.host].add(parcel)
                        member.host.tell(Sent(parcel), self._cargo.packed(parcel))
                member.host.tell(Offer(replace(task, worker=member.there)))
                messages.append(Claimed(task.key, name))
        return messages

    def _said(self, host: Host, said: Said, packed: bytes) -> list[Message]:
        if isinstance(said, Joined):
            name = plain_name(f"{host.name}-{said.worker.name}")
            self._members[name] = _Member(host, said.worker.name)
            return [Joined(replace(said.worker, name=name))]
        there = getattr(said, "worker", "")
        name = next((n for n, m in self._members.items() if m.host is host and m.there == there), "")
        member = self._members.get(name)
        if member is None:
            return []
        if isinstance(said, Alive):
            return [Alive(name)]
        if isinstance(said, Left):
            wrong = self._keep(member, packed)
            del self._members[name]
            return [Left(name, wrong or said.reason)]
        if isinstance(said, Returned) and member.task is not None and said.key == member.task.key:
            wrong = self._keep(member, packed)
            member.task = None
            return [replace(said, worker=name, error=wrong or said.error)]
        return []

    def _keep(self, member: _Member, packed: bytes) -> str:
        """Why what a machine sent of a task cannot be kept; empty where it is. One bad machine ends no fleet."""
        if member.task is None:
            return ""
        try:
            place(packed, self._root / member.task.run)
        except (LabError, OSError) as error:
            return f"{member.host.name} sent no run folder that can be kept: {error}"
        return ""

    def _lost(self, host: Host, error: LabError) -> list[Message]:
        """A connection that ended. Raises LabError where none is left."""
        gone = [name for name, member in self._members.items() if member.host is host]
        for name in gone:
            del self._members[name]
        self._sent[host].clear()  # it went with the workers there
        messages: list[Message] = [Left(name, str(error)) for name in gone]
        if not host.over:
            return messages
        if all(each.over for each in self._hosts):
            raise LabError(f"no machine of the fleet is left; the last was {host.name}: {error}")
        nobody = Worker(host.name, host.name, "", "", host.name, "", ready=False, trouble=str(error))
        return [*messages, Joined(nobody)]

    def admit(self, worker: str) -> None:
        if worker in self._members:
            self._members[worker].admitted = True
            self._members[worker].host.tell(Admit(self._members[worker].there))

    def dismiss(self, worker: str) -> None:
        if worker in self._members:
            self._members[worker].dismissed = True
            self._members[worker].host.tell(Dismiss(self._members[worker].there))

    def close(self) -> None:
        for host in self._hosts:
            host.close()
        until_s = time.monotonic() + _CLOSE_S
        for host in self._hosts:
            host.join(until_s - time.monotonic())
