"""Confirmations by fleets that lose workers; the fleet and its clock are invented, all else is real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from simulated import setup
from virtual_fleet import Nature, VirtualFleet, _Machine

from cudadent42.base.observer import Quiet
from cudadent42.decisions.racing import Rules
from cudadent42.fleet.engine import Left, Message
from cudadent42.fleet.task import Task, Way
from cudadent42.model.records import Verdict
from cudadent42.tune.coordinator import Limits
from cudadent42.tune.fleet import FleetCoordinator
from cudadent42.tune.journal import Setup, TuningJournal
from cudadent42.tune.state import State

RULES = Rules(rungs=(6, 18), margin=0.02)
GAINS = {"BLOCK=3": 0.10, "BLOCK=4": -0.2}


def tune(folder: Path, about: Setup, fleet: VirtualFleet) -> State:
    with TuningJournal(folder, about, fleet.clock) as journal:
        coordinator = FleetCoordinator(
            folder, journal, about, Limits(), Quiet(), clock=fleet.clock, judge=fleet.judge
        )
        return coordinator.run(fleet, fleet.compile([case.id for case in about.plan.cases]))


class Leaving(VirtualFleet):
    """Its workers were those of a coordinator that was killed: they end when they would confirm, and others come."""

    left = 0

    def offer(self, task: Task) -> None:
        machine = self.machines.get(task.worker)
        if machine is not None and self.left < 8:
            self.left += 1
            machine.dead, machine.went_s = True, self.now_s
            self._at(0.0, ("tell", Left(task.worker, "it ended")))
            self._at(1.0, ("join", int(machine.worker.unit.removeprefix("gpu"))))
        super().offer(task)


def test_workers_that_leave_before_they_confirm_cost_no_winner(tmp_path: Path) -> None:
    about = setup(arms=14, rules=RULES)
    fleet = Leaving(4, Nature(gains=GAINS), 1, about.arms, about.device.name)
    state = tune(tmp_path / "t", about, fleet)
    assert fleet.left == 8
    assert {each.case for each in state.winners} == {"short/fp32", "long/fp32"}
    assert all(case.lost == 0 and not case.failed for case in state.cases.values())


def test_workers_that_are_taken_away_while_they_confirm_cost_no_winner(tmp_path: Path) -> None:
    """A host with all of its GPUs."""

    class Taken(VirtualFleet):
        taken = 0

        def _claim(self, machine: _Machine, messages: list[Message]) -> None:
            super()._claim(machine, messages)
            if (
                machine.task is not None
                and machine.task.way is Way.RUN
                and self.taken < 8
                and not machine.dead
            ):
                self.taken += 1
                self._lose(machine)

    about = setup(arms=14, rules=RULES)
    fleet = Taken(8, Nature(gains=GAINS), 1, about.arms, about.device.name)
    state = tune(tmp_path / "t", about, fleet)
    assert fleet.taken == 8
    assert sum(case.lost for case in state.cases.values()) == 8
    assert {each.case for each in state.winners} == {"short/fp32", "long/fp32"}


def test_machines_that_give_no_verdict_say_why(tmp_path: Path) -> None:
    """Disturbed machines have measured nothing of the winner: that is not the same as one that is not faster."""
    about = setup(arms=14, rules=RULES)
    fleet = VirtualFleet(2, Nature(gains=GAINS), 1, about.arms, about.device.name)
    judge = fleet.judge
    fleet.judge = lambda folder, planned: replace(  # type: ignore[method-assign]
        judge(folder, planned), verdict=Verdict.UNDECIDED, holds=False, reason="no verdict: disturbed"
    )
    state = tune(tmp_path / "t", about, fleet)
    reasons = {case.confirmed.reason for case in state.cases.values() if case.confirmed is not None}
    assert reasons == {"measured as undecided on each of 2 devices (no verdict: disturbed)"}
