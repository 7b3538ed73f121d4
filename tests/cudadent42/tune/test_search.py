"""Searches by the real Optuna: journal, coordinators and rules are real too, and latencies follow a rule with noise."""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from simulated import CASES
from virtual_fleet import Compiling, Nature, VirtualFleet

from cudadent42.base.errors import UsageError
from cudadent42.base.observer import Quiet
from cudadent42.decisions.racing import exhaustive
from cudadent42.tune.coordinator import Coordinator, Limits, next_round
from cudadent42.tune.fleet import FleetCoordinator
from cudadent42.tune.journal import Proposed, Search, Searched, Setup, TuningJournal, read
from cudadent42.tune.prune import CompiledArm
from cudadent42.tune.space import DEFAULT, MOST_ARMS, parse_space
from cudadent42.tune.state import State, fold
from cudadent42.tune.strategy import begins_with, choose
from cudadent42.tune.wanted import Wanted
from flashmoe_science.jit.requirements import install_command

pytest.importorskip("optuna", reason=f"Optuna is not installed: {install_command('search')}")

from killed import Dying, Killed
from landscape import SPACE, Exploring, about, best_gain, explore, landscape, space

from cudadent42.tune.search import imported, propose

CONFIGURATIONS = sum(1 for _ in space().configurations())
SHORT = Search(round=8, rounds=3)


def engine(seed: int, cases: int = 1) -> Exploring:
    return Exploring({case.id: landscape(10 * seed + at) for at, case in enumerate(CASES[:cases])})


def proposals(state: State) -> list[str]:
    return [arm for arm in state.setup.arms if arm != DEFAULT]


def blocks(state: State) -> int:
    return sum(len(row) for case in state.cases.values() for arm, row in case.rows.items() if arm != DEFAULT)


def short_of_the_best(folder: Path, seed: int) -> float:
    """What the confirmed configuration gains less than the best one, in margins."""
    own = engine(seed)
    state = explore(folder, own, about(seed))
    (winner,) = state.winners
    land = own.lands[winner.case]
    assert blocks(state) <= exhaustive(CONFIGURATIONS, state.setup.rules) / 20
    assert fold(*read(folder)) == state
    return (best_gain(land) - land.gain(state.setup.settings[winner.arm])) / state.setup.rules.margin


@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_hundreds_is_confirmed_with_a_twentieth_of_the_blocks(tmp_path: Path, seed: int) -> None:
    assert CONFIGURATIONS > MOST_ARMS
    assert short_of_the_best(tmp_path / "t", seed) <= 1


@pytest.mark.slow
def test_nearly_every_search_ends_at_the_best_of_hundreds(tmp_path: Path) -> None:
    """A search proposes from what it saw, so one in twenty may stop on a lesser hill."""
    short = [short_of_the_best(tmp_path / str(seed), seed) for seed in range(3, 23)]
    assert sum(each <= 1 for each in short) >= 19, short
    assert max(short) <= 3, short


def test_every_proposal_is_new_meets_the_conditions_and_is_raced_on_every_case(tmp_path: Path) -> None:
    state = explore(tmp_path / "t", engine(1, cases=2), about(1, 2, SHORT))
    assert len(proposals(state)) == 24
    assert all(space().admits(settings) for settings in state.setup.settings.values())
    assert len({tuple(each.items()) for each in state.setup.settings.values()}) == 24
    for case in state.cases.values():
        assert set(case.rows) == {DEFAULT, *proposals(state)}
        assert case.added == (8, 8, 8)
        assert {len(row) for arm, row in case.rows.items() if arm != DEFAULT} <= set(state.setup.rules.rungs)
        assert min(each.rung for each in case.departed) == 0


def test_a_seed_gives_the_same_proposals_and_another_gives_others(tmp_path: Path) -> None:
    first, again, other = (
        explore(tmp_path / name, engine(2), about(seed, 1, SHORT))
        for name, seed in (("a", 2), ("b", 2), ("c", 3))
    )
    assert proposals(first) == proposals(again)
    assert proposals(first) != proposals(other)


def test_what_cannot_be_raced_is_not_proposed_for_ever(tmp_path: Path) -> None:
    """Half of the space does not compile: Optuna is told, and turns to the other half."""

    class Refusing(Exploring):
        def compile(self, arm: str) -> CompiledArm:
            if arm != DEFAULT and self.settings[arm]["WIDE"]:
                return CompiledArm(arm, {}, dict.fromkeys(self.lands, "it spills"))
            return super().compile(arm)

    setup = about(5, 1, Search(round=12, rounds=6, stale=6))
    state = explore(tmp_path / "t", Refusing(engine(5).lands), setup)
    wide = [bool(state.setup.settings[arm]["WIDE"]) for arm in proposals(state)]
    assert sum(wide[:12]) > 2
    assert sum(wide[-24:]) < sum(wide[:24])
    (case,) = state.cases.values()
    assert not any(state.setup.settings[arm]["WIDE"] for arm in case.raced if arm != DEFAULT)
    assert case.settled is not None


def test_a_small_space_is_searched_to_its_end(tmp_path: Path) -> None:
    small = parse_space(
        SPACE.split("[space]")[0].replace("where", "#") + "[space]\nSTAGES = [1, 2, 3]\n", Path("s")
    )
    setup = about(0, 1, SHORT)
    state = State(setup)
    event = propose(small, fold(setup, ()), tmp_path)
    assert isinstance(event, Proposed)
    assert sorted(event.arms) == ["STAGES=1", "STAGES=2", "STAGES=3"]
    assert event.by == f"optuna {imported().__version__}"
    state = fold(setup, ())
    state = replace(
        state, setup=replace(setup, arms={**setup.arms, **event.arms}, settings=event.settings), rounds=1
    )
    assert propose(small, state, tmp_path) == Searched("every configuration was raced")


def test_a_search_that_finds_nothing_better_ends(tmp_path: Path) -> None:
    flat = {case: replace(land, top=-0.02) for case, land in engine(4).lands.items()}
    state = explore(tmp_path / "t", Exploring(flat), about(4, 1, Search(round=6, rounds=9, stale=2)))
    assert state.searched == "2 rounds, one after the other, brought nothing better"
    assert state.finished
    assert not state.winners


def test_the_rest_of_the_race_keeps_half_of_a_budget(tmp_path: Path) -> None:
    setup = about(6, 1, SHORT)
    state = replace(fold(setup, ()), rounds=1, spent_s=51.0)

    def ask(state: State) -> Searched:
        return Searched("asked")

    assert next_round(state, Limits(budget_s=100.0), ask) == Searched("50% of the budget is used")
    with_money = replace(state, spent_s=0.0, spent_usd=2.1)
    assert next_round(with_money, Limits(usd=4.0, usd_per_hour=1.0), ask) != Searched("asked")
    assert next_round(state, Limits(budget_s=200.0), ask) == Searched("asked")


@pytest.mark.parametrize("seed", range(4))
def test_a_search_that_is_killed_goes_on(tmp_path: Path, seed: int) -> None:
    """At any write: what was proposed stays proposed, nothing is measured twice, and the end is an end like any."""
    chance = random.Random(seed)
    folder, setup, own = tmp_path / "t", about(seed, 1, SHORT), engine(seed)
    before: list[str] = []
    for _ in range(4):
        with Dying(folder, setup, chance, chance.randrange(1, 160)) as journal:
            coordinator = Coordinator(
                folder, journal, setup, Limits(), Quiet(), lambda state: propose(space(), state, folder)
            )
            try:
                coordinator.run(own)
            except Killed:
                now = proposals(fold(*read(folder)))
                assert now[: len(before)] == before
                before = now
    state = explore(folder, own, setup)
    assert state.finished
    assert len(proposals(state)) == 24
    entries = read(folder)[1]
    assert [entry.event.round for entry in entries if isinstance(entry.event, Proposed)] == [1, 2, 3]
    told = Counter(
        (entry.event.job, entry.event.attempt, entry.event.block)
        for entry in entries
        if type(entry.event).event == "block"
    )
    assert set(told.values()) == {1}
    (case,) = state.cases.values()
    assert {len(row) for arm, row in case.rows.items() if arm != DEFAULT} <= set(state.setup.rules.rungs)


class Searching(VirtualFleet):
    """Whose configurations are proposed while it works."""

    def follow(self, own: Exploring) -> Compiling:
        fleet = self

        class Following(Compiling):
            def take(self, setup: Setup) -> None:
                own.take(setup)
                fleet._arms = {implementation: arm for arm, implementation in setup.arms.items()}

        self._own = own
        return Following(tuple(own.lands))

    def gain_of(self, arm: str) -> float:
        (land,) = self._own.lands.values()
        return 0.0 if arm == DEFAULT else land.gain(self._own.settings[arm])


def test_a_fleet_searches(tmp_path: Path) -> None:
    own, setup = engine(7), about(7)
    folder = tmp_path / "t"
    fleet = Searching(6, Nature(lost_per_hour=5.0), 7, setup.arms, setup.device.name)
    with TuningJournal(folder, setup, fleet.clock) as journal:
        coordinator = FleetCoordinator(
            folder,
            journal,
            setup,
            Limits(),
            Quiet(),
            clock=fleet.clock,
            judge=fleet.judge,
            proposer=lambda state: propose(space(), state, folder),
        )
        state = coordinator.run(fleet, fleet.follow(own))
    assert state.finished
    assert fold(*read(folder)) == state
    (winner,) = state.winners
    (land,) = own.lands.values()
    # Half a percent is what a configuration may suit one machine better than another.
    assert land.gain(state.setup.settings[winner.arm]) >= best_gain(land) - 0.015
    assert winner.machines >= 4
    assert blocks(state) <= exhaustive(CONFIGURATIONS, setup.rules) / 20


def test_what_decides_between_all_and_a_search_is_said() -> None:
    few = parse_space(
        'schema_version = 1\nname = "s"\nkernel = "cudadent42[portable]"\n[space]\nblock_n = [32, 48, 64]\n',
        Path("s"),
    )
    assert choose(few, 2).search is None
    assert choose(few, 2).why == "as there are 3, and up to 500 are"
    assert choose(few, 2, budget_s=3600).search is None
    short = choose(few, 2, budget_s=20.0)
    assert short.search is not None
    assert short.why.startswith("as all 3 would take about 0.2 minutes of a budget of 0.333")
    assert choose(few, 2, Wanted.EXHAUSTIVE, 20.0).search is None
    assert choose(few, 2, Wanted.OPTUNA).search is not None
    assert "more than 500 configurations meet `where`" in choose(space(), 1).why
    assert len(begins_with(space(), choose(space(), 1, Wanted.EXHAUSTIVE))) == CONFIGURATIONS + 1
    assert [arm.name for arm in begins_with(space(), choose(space(), 1))] == [DEFAULT]
    none = parse_space(SPACE.replace("<= 16384", "<= 1"), Path("s"))
    for wanted in (Wanted.OPTUNA, Wanted.EXHAUSTIVE):
        with pytest.raises(UsageError, match="no configuration meets `where`"):
            begins_with(none, choose(none, 1, wanted))


def test_without_optuna_the_error_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"a search needs Optuna: .*pip install .*--search exhaustive"):
        imported()
