"""Tunings that are killed, run out of time or money, or are asked to stop, and go on by the same command."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from killed import Dying, Killed
from simulated import CASES, Simulated, setup, tune

from cudadent42.base.observer import Quiet
from cudadent42.tune.coordinator import STOP, Coordinator, Limits
from cudadent42.tune.engine import Block, Confirmation, OnResult, Unfit
from cudadent42.tune.journal import read
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import MOST_ATTEMPTS, Job, State, fold


def counts(state: State) -> dict[str, dict[str, int]]:
    return {case.case: {arm: len(row) for arm, row in case.rows.items()} for case in state.cases.values()}


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_kills_at_any_write_lose_nothing_and_count_nothing_twice(
    tmp_path_factory: pytest.TempPathFactory, chance: random.Random
) -> None:
    """Four kills in each of 25 tunings: a hundred."""
    folder = tmp_path_factory.mktemp("tuning") / "t"
    about = setup(arms=7)
    engine = Simulated({"BLOCK=3": 0.10, "BLOCK=4": -0.2}, same=("BLOCK=6",))
    for _ in range(4):
        with Dying(folder, about, chance, chance.randrange(1, 60)) as journal:
            coordinator = Coordinator(folder, journal, about, Limits(), Quiet())
            try:
                coordinator.run(engine)
            except Killed:
                on_disk = fold(*read(folder))
                # The file holds what the process knew; of the last write, all of it or nothing.
                known_blocks = sum(job.blocks for job in coordinator.state.jobs.values())
                assert sum(job.blocks for job in on_disk.jobs.values()) - known_blocks in (0, 1)
    assert_nothing_is_missing_or_twice(tune(folder, engine, about))


def assert_nothing_is_missing_or_twice(state: State) -> None:
    """Of a tuning in which BLOCK=3 is the best."""
    rungs = state.setup.rules.rungs
    assert state.finished
    assert {each.arm for each in state.winners} == {"BLOCK=3"}
    for case in state.cases.values():
        for arm, number in counts(state)[case.case].items():
            departed = [each.blocks for each in case.departed if each.leaving.arm == arm]
            if arm != DEFAULT:
                assert number == (departed[0] if departed else rungs[case.rung - 1]), (case.case, arm)
    for name, job in state.jobs.items():
        rung = int(name.rpartition("#")[2].partition(".")[0])
        assert job.blocks == rungs[rung] - (rungs[rung - 1] if rung else 0)


class Slow(Simulated):
    """A block takes a moment, in which its process can be killed."""

    def race(self, job: Job, *, run: str, seed: int, on_result: OnResult) -> None:
        def later(result: Block | Unfit) -> None:
            time.sleep(0.002)
            on_result(result)

        super().race(job, run=run, seed=seed, on_result=later)


def test_a_process_that_is_killed_at_any_moment_leaves_a_tuning_that_goes_on(tmp_path: Path) -> None:
    """Real processes, ended by SIGKILL; how far each comes is chance."""
    chance = random.Random(7)
    about = setup(arms=7)
    engine = Slow({"BLOCK=3": 0.10, "BLOCK=4": -0.2}, same=("BLOCK=6",))
    for number in range(2):
        folder = tmp_path / f"t{number}"
        for _ in range(10):
            worker = multiprocessing.get_context("fork").Process(target=tune, args=(folder, engine, about))
            worker.start()
            worker.join(chance.uniform(0.0, 0.2))
            worker.kill()
            worker.join()
        assert_nothing_is_missing_or_twice(tune(folder, engine, about))


class Clock:
    """Moves by ten seconds at every look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 10.0
        return self.now_s


def test_a_budget_is_never_passed_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", Clock())
    engine = Simulated({"BLOCK=3": 0.06})
    spent = 0.0
    for budget_s in (100.0, 200.0, 300.0):
        state = tune(tmp_path / "t", engine, limits=Limits(budget_s=budget_s))
        assert "budget is used up" in state.paused
        assert spent < state.spent_s <= budget_s
        spent = state.spent_s
    state = tune(tmp_path / "t", engine)
    assert state.finished
    assert not state.paused


def test_where_a_budget_ends_it_the_cases_before_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gains = {"BLOCK=3": 0.06, "BLOCK=5": 0.05, "BLOCK=6": 0.05}
    engine = Simulated(gains, spread=0.02)
    whole = tune(tmp_path / "whole", engine)
    of_case = [name.partition("#")[0] for name, _, _ in engine.jobs]
    assert any("#1." in name for name, _, _ in engine.jobs), "a race of one rung has no order"
    assert of_case == sorted(of_case, key=[case.id for case in CASES].index)
    # A look at the clock for every entry, ten seconds each.
    looks_s = 10.0 * len(read(tmp_path / "whole")[1])
    monkeypatch.setattr("time.monotonic", Clock())
    state = tune(tmp_path / "t", Simulated(gains, spread=0.02), limits=Limits(budget_s=0.75 * looks_s))
    assert "budget is used up" in state.paused
    first, second = (state.cases[case.id] for case in CASES)
    assert (first.finished, second.finished) == (True, False)
    assert state.winners == whole.winners[:1]


def test_money_is_never_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", Clock())
    state = tune(tmp_path / "t", Simulated(), limits=Limits(usd=0.3, usd_per_hour=3.0))
    assert state.paused
    assert 0.25 < state.spent_usd <= 0.3


def test_it_stops_when_it_is_asked_to(tmp_path: Path) -> None:
    class Asked(Simulated):
        def race(self, job, *, run, seed, on_result):  # type: ignore[no-untyped-def]
            if self.blocks > 10:
                (tmp_path / "t" / STOP).touch()
            super().race(job, run=run, seed=seed, on_result=on_result)

    state = tune(tmp_path / "t", Asked())
    assert state.paused == "it was asked to stop"
    assert tune(tmp_path / "t", Simulated()).finished


def test_kills_and_limits_do_not_use_up_the_confirmations_of_a_case(tmp_path: Path) -> None:
    """More often than confirmations may fail."""

    class KilledWhileConfirming(Simulated):
        def confirm(self, *given: object, **how: object) -> Confirmation:
            raise Killed

    gains = {"BLOCK=1": 0.06}
    for _ in range(MOST_ATTEMPTS + 1):
        with pytest.raises(Killed):
            tune(tmp_path / "t", KilledWhileConfirming(gains))
    for _ in range(MOST_ATTEMPTS + 1):
        state = tune(tmp_path / "t", Simulated(gains, hurried=1))
        assert "the budget ended the confirmation" in state.paused
    assert len(tune(tmp_path / "t", Simulated(gains)).winners) == 2
