"""Tunings by invented fleets: what their tests share."""

from __future__ import annotations

from pathlib import Path

from virtual_fleet import Nature, VirtualFleet

from cudadent42.base.observer import Quiet
from cudadent42.decisions.racing import Rules
from cudadent42.tune.coordinator import Limits
from cudadent42.tune.fleet import FleetCoordinator
from cudadent42.tune.journal import Setup, TuningJournal
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import State

RULES = Rules(rungs=(6, 18), margin=0.02)
GAINS = {"BLOCK=3": 0.10, "BLOCK=4": -0.2}


def virtual(
    about: Setup, machines: int, seed: int = 1, began_s: float = 0.0, **nature: object
) -> VirtualFleet:
    own = Nature(**{"gains": GAINS, **nature})  # type: ignore[arg-type]
    return VirtualFleet(machines, own, seed, about.arms, about.device.name, began_s)


def tune(
    folder: Path,
    about: Setup,
    fleet: VirtualFleet,
    limits: Limits | None = None,
    journal: TuningJournal | None = None,
) -> State:
    with journal or TuningJournal(folder, about, fleet.clock) as opened:
        coordinator = FleetCoordinator(
            folder, opened, about, limits or Limits(), Quiet(), clock=fleet.clock, judge=fleet.judge
        )
        return coordinator.run(fleet, fleet.compile([case.id for case in about.plan.cases]))


def assert_nothing_is_missing_or_twice(state: State) -> None:
    rungs = state.setup.rules.rungs
    assert state.finished
    for case in state.cases.values():
        for arm, row in case.rows.items():
            departed = [each.blocks for each in case.departed if each.leaving.arm == arm]
            if arm != DEFAULT:
                assert len(row) == (departed[0] if departed else rungs[case.rung - 1]), (case.case, arm)
    for name, job in state.jobs.items():
        rung = int(name.rpartition("#")[2].partition(".")[0])
        assert job.blocks == rungs[rung] - (rungs[rung - 1] if rung else 0)
