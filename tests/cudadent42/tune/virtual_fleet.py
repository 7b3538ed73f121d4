"""A fleet in a clock of its own: an `Engine` whose workers take as long as it says. The rest of a tuning is real."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cudadent42.base.parcels import Parcel
from cudadent42.fleet.desk import HEARTBEAT_S
from cudadent42.fleet.engine import Alive, Claimed, Joined, Left, Message
from cudadent42.fleet.task import Block, Returned, Task, Way, Worker
from cudadent42.model.records import Plan, Verdict
from cudadent42.tune.engine import Confirmation
from cudadent42.tune.journal import Setup
from cudadent42.tune.prune import CompiledArm
from cudadent42.tune.space import DEFAULT


@dataclass(frozen=True)
class Nature:
    """What happens in it, in seconds and shares."""

    gains: Mapping[str, float] = field(default_factory=dict)
    """By arm, how much faster than the default."""
    spread: float = 0.005
    """Of a block."""
    interaction: float = 0.002
    """Of an arm with a machine."""
    speed_spread: float = 0.03
    slow_share: float = 0.01
    """Of machines, that take half as long again."""
    drift: float = 0.005
    """Of a machine from task to task, an AR(1) process."""
    coupling: float = 0.02
    """A machine is slower by this while most of its host is busy."""
    hosts: int = 8
    """Machines of a host."""
    up_s: float = 0.0
    """That a worker is paid for before it joins."""
    start_s: float = 8.0
    """Of a task, before it measures."""
    arm_block_s: float = 0.2
    lost_per_hour: float = 0.0
    """Workers that are taken away; another comes in a minute."""
    failing: float = 0.0
    """Of tasks, that end with an error half way."""
    twice: float = 0.0
    """Of results, that are told twice."""
    late: float = 0.0
    """Of results, that come after their worker was given up."""


@dataclass
class _Machine:
    worker: Worker
    speed: float
    host: int
    drift: float = 0.0
    task: Task | None = None
    came_s: float = 0.0
    went_s: float = math.inf
    busy_s: float = 0.0
    """At tasks that came to their end."""
    leaving: bool = False
    dead: bool = False

    def present_s(self, now_s: float) -> float:
        return min(self.went_s, now_s) - self.came_s


class VirtualFleet:
    """An `Engine` and a clock. ``root``: where confirmations leave what they came to."""

    def __init__(
        self,
        machines: int,
        nature: Nature,
        seed: int,
        names: Mapping[str, str],
        kind: str,
        began_s: float = 0.0,
    ) -> None:
        """``names``: the implementation of each arm."""
        self.now_s = began_s
        self.nature = nature
        self.chance = random.Random(seed)
        self.confirmed: dict[str, Confirmation] = {}
        self.closed = False
        self.done = 0
        self._arms = {implementation: arm for arm, implementation in names.items()}
        self._kind = kind
        self._count = itertools.count()
        self._events: list[tuple[float, int, object]] = []
        self._offers: dict[str, Task] = {}
        self._open: list[str] = []
        self._busy: dict[int, int] = {}
        self._interactions: dict[tuple[str, str], float] = {}
        self.machines: dict[str, _Machine] = {}
        for number in range(machines):
            self._at(self.chance.uniform(0.0, 5.0), ("join", number))

    def clock(self) -> float:
        return self.now_s

    # ---------------------------------------------------------------- the engine

    def parcels(self, plan: Plan) -> tuple[Parcel, ...]:
        return ()

    def offer(self, task: Task) -> None:
        self._offers[task.key] = task
        if not task.worker:
            self._open.append(task.key)

    def withdraw(self, key: str) -> bool:
        return self._offers.pop(key, None) is not None

    def held(self) -> Mapping[str, str]:
        return {}

    def admit(self, worker: str) -> None:
        return

    def dismiss(self, worker: str) -> None:
        if worker in self.machines:
            self.machines[worker].leaving = True

    def close(self) -> None:
        self.closed = True

    def wait(self, seconds: float) -> Sequence[Message]:
        """Everything that happens within these seconds."""
        until_s = self.now_s + seconds
        messages: list[Message] = []
        self._claim_all(messages)
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            self._happen(event, messages)
        self.now_s = until_s
        return messages

    # ---------------------------------------------------------------- the world

    def _at(self, in_s: float, event: object) -> None:
        heapq.heappush(self._events, (self.now_s + in_s, next(self._count), event))

    def _happen(self, event: object, messages: list[Message]) -> None:
        kind, what = event  # type: ignore[misc]
        if kind == "join":
            self._join(what, messages)
        elif kind == "beat":
            if not what.dead:
                messages.append(Alive(what.worker.name))
                self._at(4 * HEARTBEAT_S, ("beat", what))
        elif kind == "lose":
            if not what.dead:
                self._lose(what)
        elif kind == "tell":
            messages.append(what)
        elif kind == "end":
            machine, task, seconds = what
            if not machine.dead:
                self._end(machine, task, seconds, messages)

    def _join(self, number: int, messages: list[Message]) -> None:
        name = f"w{number}-{next(self._count)}"
        host = number // self.nature.hosts
        unit = random.Random(f"{number}")  # a machine that comes again is what it was
        speed = math.exp(unit.gauss(0.0, self.nature.speed_spread))
        if unit.random() < self.nature.slow_share:
            speed *= 1.5
        worker = Worker(
            name, f"host{host}", "cuda:0", self._kind, f"gpu{number}", tree="", up_s=self.nature.up_s
        )
        machine = _Machine(worker, speed, host, came_s=self.now_s)
        self.machines[name] = machine
        messages.append(Joined(worker))
        self._at(self.chance.uniform(0.0, 4 * HEARTBEAT_S), ("beat", machine))
        if self.nature.lost_per_hour:
            self._at(self.chance.expovariate(self.nature.lost_per_hour / 3600), ("lose", machine))
        self._claim(machine, messages)

    def _lose(self, machine: _Machine) -> None:
        machine.dead, machine.went_s = True, self.now_s
        number = int(machine.worker.unit.removeprefix("gpu"))
        if machine.task is not None:
            self._busy[machine.host] -= 1
            if self.chance.random() < self.nature.late:
                late = Returned(machine.task.key, machine.worker.name, 1.0)
                self._at(90.0, ("tell", late))
        if self.chance.random() < 0.5:
            self._at(0.0, ("tell", Left(machine.worker.name, "preempted")))
        self._at(60.0, ("join", number))

    def _claim_all(self, messages: list[Message]) -> None:
        if self._offers:
            for machine in self.machines.values():
                if machine.task is None:
                    self._claim(machine, messages)

    def _claim(self, machine: _Machine, messages: list[Message]) -> None:
        if machine.dead or machine.leaving or machine.task is not None:
            return
        task = self._next(machine.worker.name)
        if task is None:
            return
        machine.task = task
        self._busy[machine.host] = self._busy.get(machine.host, 0) + 1
        messages.append(Claimed(task.key, machine.worker.name))
        plan = task.plan
        arm_blocks = plan.repeats * (len(plan.implementations) + (2 if task.way is Way.RUN else 0))
        seconds = self.nature.start_s + arm_blocks * self.nature.arm_block_s * machine.speed
        seconds *= self.chance.uniform(0.95, 1.05)
        self._at(seconds, ("end", (machine, task, seconds)))

    def _next(self, worker: str) -> Task | None:
        mine = next((key for key, task in self._offers.items() if task.worker == worker), None)
        if mine is not None:
            return self._offers.pop(mine)
        while self._open:
            task = self._offers.pop(self._open.pop(0), None)
            if task is not None:
                return task
        return None

    def _end(self, machine: _Machine, task: Task, seconds: float, messages: list[Message]) -> None:
        machine.task = None
        machine.busy_s += seconds
        self.done += 1
        if task.way is Way.RUN:
            returned = Returned(task.key, machine.worker.name, seconds)
            self.confirmed[task.run] = self._confirmation(machine, task)
        else:
            returned = self._race(machine, task, seconds)
        self._busy[machine.host] -= 1
        messages.append(returned)
        if self.chance.random() < self.nature.twice:
            messages.append(returned)
        self._claim(machine, messages)

    def _gain(self, machine: _Machine, arm: str) -> float:
        """Logarithm of the ratio on this machine."""
        key = machine.worker.unit, arm
        if key not in self._interactions:
            own = random.Random(f"{key}")
            self._interactions[key] = 0.0 if arm == DEFAULT else own.gauss(0.0, self.nature.interaction)
        return math.log1p(self.gain_of(arm)) + self._interactions[key]

    def gain_of(self, arm: str) -> float:
        return self.nature.gains.get(arm, 0.0)

    def _level(self, machine: _Machine) -> float:
        machine.drift = 0.9 * machine.drift + self.chance.gauss(0.0, self.nature.drift)
        coupled = self.nature.coupling if self._busy[machine.host] >= 0.75 * self.nature.hosts else 0.0
        return machine.speed * (1 + machine.drift) * (1 + coupled)

    def _race(self, machine: _Machine, task: Task, seconds: float) -> Returned:
        plan, chance, spread = task.plan, self.chance, self.nature.spread
        factors = [math.exp(-self._gain(machine, self._arms[name])) for name in plan.implementations]
        failed = chance.random() < self.nature.failing
        level = self._level(machine)
        blocks = []
        for number in range(plan.repeats // 2 if failed else plan.repeats):
            shared = level * (1.3 if chance.random() < 0.03 else 1.0)
            blocks.append(
                Block(
                    number,
                    {
                        name: shared * factor * (1 + chance.gauss(0.0, spread))
                        for name, factor in zip(plan.implementations, factors, strict=True)
                    },
                )
            )
        error = "the worker died" if failed else ""
        return Returned(task.key, machine.worker.name, seconds, tuple(blocks), {}, error)

    def _confirmation(self, machine: _Machine, task: Task) -> Confirmation:
        arm = self._arms[task.plan.implementations[1]]
        own = self._gain(machine, arm)
        error = self.nature.spread * math.sqrt(2 / task.plan.repeats)
        centre = own + self.chance.gauss(0.0, error)
        low, high = math.exp(centre - 2 * error), math.exp(centre + 2 * error)
        faster = low > 1 + task.plan.margin
        verdict = Verdict.FASTER if faster else Verdict.UNDECIDED
        return Confirmation(
            math.exp(centre), low, high, verdict, faster, verdict.value, default_ms=self._level_of(machine)
        )

    def _level_of(self, machine: _Machine) -> float:
        return machine.speed * (1 + machine.drift)

    def judge(self, folder: Path, planned: int) -> Confirmation:
        """What `FleetCoordinator` asks in the place of reading a run folder."""
        return self.confirmed[f"{folder.parent.name}/{folder.name}"]

    @staticmethod
    def compile(cases: Sequence[str]) -> Compiling:
        return Compiling(tuple(cases))


@dataclass(frozen=True)
class Compiling:
    """A `Compiler` of arms that all have code of their own."""

    cases: tuple[str, ...]

    def take(self, setup: Setup) -> None:
        return

    def compile(self, arm: str) -> CompiledArm:
        return CompiledArm(arm, dict.fromkeys(self.cases, f"code of {arm}"))
