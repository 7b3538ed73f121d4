"""What a fleet's workers are told: files that they do not have, whom others have verified, and when to confirm."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fleet_tunings import GAINS, RULES, assert_nothing_is_missing_or_twice, tune, virtual
from simulated import setup
from virtual_fleet import Compiling, Nature, VirtualFleet, _Machine

from cudadent42.base.errors import UsageError
from cudadent42.base.parcels import Parcel
from cudadent42.decisions.racing import Rules
from cudadent42.fleet.engine import Message
from cudadent42.fleet.task import Returned, Right, Task, Way
from cudadent42.model.records import Plan
from cudadent42.tune import journal as events
from cudadent42.tune.coordinator import Limits
from cudadent42.tune.journal import Setup, read
from cudadent42.tune.prune import CompiledArm
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import fold


class Elsewhere(VirtualFleet):
    """Machines that do not see this one's disk: every implementation is in files, of this state."""

    state = "a"

    def parcels(self, plan: Plan) -> tuple[Parcel, ...]:
        digest = hashlib.sha256(self.state.encode()).hexdigest()
        return tuple(Parcel(digest, name, "k.toml") for name in plan.implementations)

    def offer(self, task: Task) -> None:
        self.__dict__.setdefault("tasks", {})[task.key] = task
        super().offer(task)

    def wait(self, seconds: float) -> Sequence[Message]:
        return [
            replace(each, parcels=self.__dict__["tasks"][each.key].parcels)
            if isinstance(each, Returned)
            else each
            for each in super().wait(seconds)
        ]


def test_a_tuning_of_files_elsewhere_goes_on_with_the_same_files_alone(tmp_path: Path) -> None:
    about = setup(arms=14, rules=RULES)

    def fleet(seed: int, state: str = "a") -> VirtualFleet:
        made = Elsewhere(3, Nature(gains=GAINS), seed, about.arms, about.device.name)
        made.state = state
        return made

    begun = tune(tmp_path / "t", about, fleet(1), Limits(budget_s=120.0))
    assert begun.paused
    assert begun.arm_blocks
    (sent,) = (each.event for each in read(tmp_path / "t")[1] if isinstance(each.event, events.Sent))
    assert sent.files.keys() == about.arms.keys()
    with pytest.raises(
        UsageError, match=r"the files of 'default' are others .* put the former back, or begin another"
    ):
        tune(tmp_path / "t", about, fleet(2, "b"))
    assert fold(*read(tmp_path / "t")).arm_blocks == begun.arm_blocks
    state = tune(tmp_path / "t", about, fleet(3))
    assert_nothing_is_missing_or_twice(state)
    assert {each.arm for each in state.winners} == {"BLOCK=3"}
    assert sum(isinstance(each.event, events.Sent) for each in read(tmp_path / "t")[1]) == 1


class Watched(VirtualFleet):
    """Workers find everything right but BLOCK=5; what is offered is kept in its order."""

    def watch(self) -> Watched:
        self.offered: list[Task] = []
        self.seen: dict[str, set[str]] = {}
        return self

    def offer(self, task: Task) -> None:
        self.offered.append(task)
        super().offer(task)

    def _race(self, machine: _Machine, task: Task, seconds: float) -> Returned:
        (case,) = task.plan.cases
        assert set(task.right.on_case) <= self.seen.get(case.id, set())
        right = tuple(name for name in task.plan.implementations if name != "BLOCK=5.toml")
        self.seen.setdefault(case.id, set()).update(right)
        return replace(super()._race(machine, task, seconds), right=right)


def watched(about: Setup, machines: int, gains: Mapping[str, float] = GAINS) -> Watched:
    nature = Nature(gains=gains)
    return Watched(machines, nature, 1, about.arms, about.device.name).watch()


def test_what_one_worker_has_verified_is_told_to_the_next(tmp_path: Path) -> None:
    about = setup(arms=14, rules=RULES)
    fleet = watched(about, 2, {"BLOCK=3": 0.03, "BLOCK=4": 0.029})
    assert tune(tmp_path / "t", about, fleet).finished
    races = [task for task in fleet.offered if task.way is Way.RACE]
    assert races[0].right == Right()
    assert set(races[-1].right.on_case) == set(races[-1].plan.implementations) - {"BLOCK=5.toml"}
    other_case = next(task for task in races if task.right.anywhere and not task.right.on_case)
    assert other_case.plan.cases != races[0].plan.cases
    assert all("BLOCK=5.toml" not in task.right.anywhere for task in races)
    assert all(task.right == Right() for task in fleet.offered if task.way is Way.RUN)


@pytest.mark.parametrize("limits", [Limits(), Limits(budget_s=1e6), Limits(usd=1e6, usd_per_hour=1.0)])
def test_confirmations_come_last_unless_a_limit_may_end_the_tuning(tmp_path: Path, limits: Limits) -> None:
    """What races in a worker ends for a confirmation. Here one case is over long before the other, whose rungs are a
    job each: between them no race waits."""

    class Uneven(Compiling):
        def compile(self, arm: str) -> CompiledArm:
            return CompiledArm(arm, dict.fromkeys(self.cases[arm not in (DEFAULT, "BLOCK=3") :], arm))

    about = setup(arms=6, rules=Rules(rungs=(6, 18, 54), margin=0.02))
    fleet = watched(about, 1, {"BLOCK=3": 0.10, "BLOCK=4": 0.099})
    fleet.compile = Uneven  # type: ignore[method-assign, assignment]
    state = tune(tmp_path / "t", about, fleet, limits)
    assert len(state.winners) == 2
    assert sorted(case.rung for case in state.cases.values()) == [1, 3]
    ways = [task.way for task in fleet.offered]
    early = Way.RACE in ways[ways.index(Way.RUN) :]
    assert early is limits.there_are


def test_a_leader_that_gains_too_little_is_not_confirmed(tmp_path: Path) -> None:
    """Between machines half a percent is allowed for, which keeps such arms in the race to its end."""
    about = setup(arms=3, rules=Rules(rungs=(6, 18, 54), margin=0.02))
    fleet = virtual(about, 2, gains={"BLOCK=0": 0.008, "BLOCK=1": -0.2, "BLOCK=2": -0.2}, interaction=0.0)
    state = tune(tmp_path / "t", about, fleet)
    assert state.finished
    for case in state.cases.values():
        assert len(case.rows["BLOCK=0"]) == 54
        assert case.settled is not None
        assert case.settled.leader == DEFAULT
        assert case.settled.reason == "BLOCK=0 leads, and is not better than the default by the margin"
        assert case.confirmed is None
    assert not fleet.confirmed
