"""Tunings with the real journal, state and coordinator; what is measured is invented."""

from __future__ import annotations

import errno
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated import CASES, Simulated, setup, tune

from cudadent42.base.append import AppendOnlyFile
from cudadent42.base.errors import LabError, MachineNotReadyError, UnwritableError, UsageError
from cudadent42.base.serialise import decode
from cudadent42.decisions.confirmation import LEAST
from cudadent42.decisions.racing import Cause, Rules, exhaustive
from cudadent42.tune.engine import Confirmation, OnResult, Unfit
from cudadent42.tune.journal import Entry, TuningJournal, read
from cudadent42.tune.report.view import case_row
from cudadent42.tune.rungs import next_step
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import MOST_ATTEMPTS, Job, fold


def test_the_best_arm_is_confirmed_in_every_case(tmp_path: Path) -> None:
    engine = Simulated({"BLOCK=3": 0.06, "BLOCK=5": -0.2, "BLOCK=6": 0.03})
    state = tune(tmp_path / "t", engine)
    assert state.finished
    assert [(each.case, each.arm) for each in state.winners] == [(case.id, "BLOCK=3") for case in CASES]
    short = state.cases["short/fp32"]
    assert short.settled is not None
    assert {each.leaving.arm for each in short.departed if each.leaving.cause is Cause.NO_GAIN} >= {"BLOCK=5"}
    assert DEFAULT in short.alive
    assert next_step(state) is None
    # What is read back, also by somebody else, is the same state.
    about, entries = read(tmp_path / "t")
    assert fold(about, entries) == state


def test_arms_of_one_code_are_raced_once_and_never_beside_the_default(tmp_path: Path) -> None:
    same = tuple(f"BLOCK={number}" for number in range(7))
    state = tune(tmp_path / "t", Simulated({"BLOCK=7": -0.1}, same=same))
    case = state.cases["short/fp32"]
    assert case.raced == (DEFAULT, "BLOCK=7")
    assert case.pruned["BLOCK=2"] == "the same machine code as default"
    assert state.winners == ()
    assert state.finished


def test_where_nothing_is_faster_the_default_stays_and_no_confirmation_is_run(tmp_path: Path) -> None:
    state = tune(tmp_path / "t", Simulated({f"BLOCK={number}": -0.05 for number in range(8)}))
    assert state.finished
    assert all(case.settled and case.settled.leader == DEFAULT for case in state.cases.values())
    assert all(case.confirmations == 0 for case in state.cases.values())


def test_a_winner_that_is_not_confirmed_does_not_win(tmp_path: Path) -> None:
    state = tune(tmp_path / "t", Simulated({"BLOCK=1": 0.06}, confirmed_gains={"BLOCK=1": 0.01}))
    assert state.finished
    assert state.winners == ()
    confirmed = state.cases["long/fp32"].confirmed
    assert confirmed is not None
    assert not confirmed.holds


def test_a_confirmation_that_the_time_ended_says_nothing_and_is_run_again(tmp_path: Path) -> None:
    engine = Simulated({"BLOCK=1": 0.06}, hurried=1)
    state = tune(tmp_path / "t", engine)
    assert "the budget ended the confirmation" in state.paused
    assert all(case.confirmed is None for case in state.cases.values())
    assert len(tune(tmp_path / "t", engine).winners) == 2


def test_an_arm_that_is_wrong_is_out_with_its_reason(tmp_path: Path) -> None:
    state = tune(
        tmp_path / "t", Simulated({"BLOCK=1": 0.5, "BLOCK=2": 0.06}, wrong={"BLOCK=1": "failed verification"})
    )
    assert state.cases["short/fp32"].out == {"BLOCK=1": "failed verification"}
    assert {each.arm for each in state.winners} == {"BLOCK=2"}


def test_a_default_that_cannot_be_raced_settles_the_case(tmp_path: Path) -> None:
    state = tune(tmp_path / "t", Simulated(wrong={DEFAULT: "it is wrong"}))
    assert state.finished
    settled = state.cases["short/fp32"].settled
    assert settled is not None
    assert "default" in settled.reason


@pytest.mark.parametrize("how", ["no worker starts", "the default is unfit"])
def test_a_machine_that_fails_costs_no_arm_and_the_same_command_goes_on(tmp_path: Path, how: str) -> None:
    """As a GPU that fell off: everything fails on it from then on, the default too."""

    class Broken(Simulated):
        def race(self, job: Job, *, run: str, seed: int, on_result: OnResult) -> None:
            if job.rung > 0 and how == "no worker starts":
                raise MachineNotReadyError("the worker did not start (CUDA error: no device)")
            if job.rung > 0:
                on_result(Unfit(DEFAULT, "CUDA error: unspecified launch failure"))
                return
            super().race(job, run=run, seed=seed, on_result=on_result)

    gains = {"BLOCK=1": 0.06, "BLOCK=2": 0.052, "BLOCK=3": 0.05}
    about = setup(rules=Rules(rungs=(6, 18), margin=0.01, near=0.0))
    with pytest.raises(MachineNotReadyError, match="CUDA error"):
        tune(tmp_path / "t", Broken(gains), about)
    state = fold(*read(tmp_path / "t"))
    assert "CUDA error" in state.paused
    assert all(not case.out and case.settled is None for case in state.cases.values())
    again = tune(tmp_path / "t", Simulated(gains), about)
    assert again.finished
    assert {each.arm for each in again.winners} == {"BLOCK=1"}
    assert all(not case.out for case in again.cases.values())


def test_a_default_that_never_comes_back_ends_its_case_and_no_other(tmp_path: Path) -> None:
    """As where a later rung of one case needs more memory than there is."""

    class TooLarge(Simulated):
        def race(self, job: Job, *, run: str, seed: int, on_result: OnResult) -> None:
            if job.rung > 0 and job.case == "short/fp32":
                on_result(Unfit(DEFAULT, "out of memory"))
            super().race(job, run=run, seed=seed, on_result=on_result)

    engine = TooLarge({"BLOCK=1": 0.06, "BLOCK=2": 0.052, "BLOCK=3": 0.05})
    about = setup(rules=Rules(rungs=(6, 18), margin=0.01, near=0.0))
    for _ in range(MOST_ATTEMPTS - 1):
        with pytest.raises(MachineNotReadyError, match="out of memory; look at the machine"):
            tune(tmp_path / "t", engine, about)
    state = tune(tmp_path / "t", engine, about)
    assert state.finished
    settled = state.cases["short/fp32"].settled
    assert settled is not None
    assert "the default cannot be raced: 3 races failed, the last: the default was raced" in settled.reason
    assert [(each.case, each.arm) for each in state.winners] == [("long/fp32", "BLOCK=1")]


def test_jobs_that_fail_are_tried_again_and_their_blocks_count(tmp_path: Path) -> None:
    about = setup(arms=3)
    engine = Simulated({"BLOCK=1": 0.06}, failing=2)
    state = tune(tmp_path / "t", engine, about)
    first = "short/fp32#0.0"
    assert state.jobs[first].failures == 2
    assert state.jobs[first].blocks == about.rules.rungs[0]
    attempts = [(attempt, seed) for name, attempt, seed in engine.jobs if name == first]
    assert [attempt for attempt, _ in attempts] == [1, 2, 3]
    assert len({seed for _, seed in attempts}) == 3
    assert len(state.winners) == 2


def test_an_arm_whose_races_always_fail_is_out(tmp_path: Path) -> None:
    about = setup(arms=1, cases=CASES[:1])
    state = tune(
        tmp_path / "t", Simulated(failing=10**6), replace(about, rules=replace(about.rules, rungs=(60,)))
    )
    assert state.finished
    assert "3 races failed, the last: the worker died" in state.cases["short/fp32"].out["BLOCK=0"]


def test_a_full_disk_costs_no_arm_and_no_winner(tmp_path: Path) -> None:
    """However often the command is given while nothing can be written."""

    class Full(Simulated):
        where = ""

        def race(self, job: Job, **how: Any) -> None:
            if self.where == "races":
                raise UnwritableError("No space left on device")
            super().race(job, **how)

        def confirm(self, case: str, arm: str, **how: Any) -> Confirmation:
            if self.where == "confirmed":
                raise UnwritableError("No space left on device")
            return super().confirm(case, arm, **how)

    engine = Full({"BLOCK=1": 0.06})
    for engine.where in ["races"] * (MOST_ATTEMPTS + 1) + ["confirmed"] * (MOST_ATTEMPTS + 1):
        with pytest.raises(UnwritableError):
            tune(tmp_path / "t", engine)
    engine.where = ""
    state = tune(tmp_path / "t", engine)
    assert len(state.winners) == 2
    assert not any(case.out or case.failed for case in state.cases.values())


def test_a_journal_that_takes_no_block_costs_no_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may be full for a moment, and take what is said of it a moment later."""
    append = AppendOnlyFile.append

    def full(self: AppendOnlyFile, text: str) -> None:
        if '"event": "block"' in text:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, text)

    engine = Simulated({"BLOCK=1": 0.06})
    for _ in range(MOST_ATTEMPTS + 1):
        with monkeypatch.context() as patch:
            patch.setattr(AppendOnlyFile, "append", full)
            with pytest.raises(UnwritableError):
                tune(tmp_path / "t", engine)
    state = tune(tmp_path / "t", engine)
    assert len(state.winners) == 2
    assert not any(case.out for case in state.cases.values())


def test_a_journal_of_another_tuning_is_refused(tmp_path: Path) -> None:
    tune(tmp_path / "t", Simulated())
    with pytest.raises(UsageError, match="is about other spaces"):
        tune(tmp_path / "t", Simulated(), replace(setup(), kernel_digest="another"))


def test_two_coordinators_do_not_share_a_tuning(tmp_path: Path) -> None:
    with TuningJournal(tmp_path / "t", setup()), pytest.raises(UsageError, match="in use"):
        TuningJournal(tmp_path / "t", setup())


def test_twenty_sweeps_install_what_was_planted_and_cost_a_part_of_a_sweep(tmp_path: Path) -> None:
    about = setup(arms=24, cases=CASES[:1], rules=Rules(margin=0.02))
    installed, blocks = 0, 0
    for number in range(20):
        chance = random.Random(number)
        gains = {arm: min(chance.gauss(-0.05, 0.05), 0.03) for arm in about.settings}
        planted = f"BLOCK={number}"
        gains[planted] = 0.06
        seeded = replace(about, plan=replace(about.plan, seed=number))
        state = tune(tmp_path / f"t{number}", Simulated(gains), seeded)
        installed += [each.arm for each in state.winners] == [planted]
        blocks += sum(len(row) for arm, row in state.cases["short/fp32"].rows.items() if arm != DEFAULT)
    assert installed == 20
    assert blocks <= 20 * exhaustive(24, about.rules) / 5


@pytest.mark.parametrize("spread", [0.003, 0.01])
def test_few_arms_cost_a_fifth_of_a_sweep_too(tmp_path: Path, spread: float) -> None:
    """Once one is left that is certainly better, the rest is its confirmation's."""
    about = setup(arms=7, cases=CASES[:1])
    about = replace(about, rules=Rules(margin=0.01))
    costs = dict(zip(about.settings, (94, 103, 106, 110, 115, 120, 130), strict=True))
    blocks = 0
    for number in range(20):
        seeded = replace(about, plan=replace(about.plan, seed=number))
        engine = Simulated({arm: 100 / cost - 1 for arm, cost in costs.items()}, spread)
        state = tune(tmp_path / f"t{number}", engine, seeded)
        assert [each.arm for each in state.winners] == ["BLOCK=0"]
        (case,) = state.cases.values()
        blocks += sum(len(row) for arm, row in case.rows.items() if arm != DEFAULT)
    assert blocks <= 20 * exhaustive(7, about.rules) / 5


def test_an_arm_that_is_left_alone_without_a_certain_gain_is_raced_to_the_end(tmp_path: Path) -> None:
    about = setup(arms=2, cases=CASES[:1])
    about = replace(about, rules=replace(about.rules, rungs=(6, 18, 54), margin=0.02))
    state = tune(tmp_path / "t", Simulated({"BLOCK=0": 0.025, "BLOCK=1": -0.3}, 0.01), about)
    (case,) = state.cases.values()
    assert case.rung == 3
    assert len(case.rows["BLOCK=0"]) == 54


def test_arms_that_are_nearly_as_good_end_a_race_together(tmp_path: Path) -> None:
    about = setup(arms=6, cases=CASES[:1], rules=Rules(margin=0.02))
    engine = Simulated({"BLOCK=0": 0.060, "BLOCK=1": 0.060, "BLOCK=2": 0.059, "BLOCK=3": -0.3}, 0.003)
    (case,) = tune(tmp_path / "t", engine, about).cases.values()
    assert case.settled is not None
    assert case.settled.leader in {"BLOCK=0", "BLOCK=1", "BLOCK=2"}
    assert set(case.settled.unseparated) <= {"BLOCK=0", "BLOCK=1", "BLOCK=2"}
    assert case.settled.unseparated
    assert "no other arm can be better by 1 %" in case.settled.reason
    assert case.rung < len(about.rules.rungs)
    assert case.confirmed is not None
    assert case.confirmed.holds


def test_noise_of_the_race_says_how_many_blocks_confirm(tmp_path: Path) -> None:
    asked = []
    for number, spread in enumerate((0.001, 0.02)):
        engine = Simulated({"BLOCK=0": 0.15}, spread)
        state = tune(
            tmp_path / f"t{number}", engine, setup(arms=2, cases=CASES[:1], rules=Rules(margin=0.02))
        )
        (case,) = state.cases.values()
        assert case.settled is not None
        assert engine.confirming_blocks == [case.settled.blocks]
        asked.append(case.settled.blocks)
    assert asked[0] == LEAST < asked[1]


def test_a_journal_from_before_confirmations_were_sized_has_54_blocks() -> None:
    fields = {"event": "settled", "case": "c", "leader": "a", "unseparated": [], "reason": "it leads"}
    line = {"time": "2026-11-22T00:00:00+00:00", "elapsed_s": 1.0, "event": fields}
    assert decode(Entry, line).event.blocks == 54


@pytest.mark.parametrize("seed", range(3))
def test_arms_of_equal_speed_are_not_installed(tmp_path: Path, seed: int) -> None:
    about = setup(arms=12)
    about = replace(about, plan=replace(about.plan, seed=seed))
    assert tune(tmp_path / "t", Simulated(), about).winners == ()


def test_a_confirmation_that_always_fails_ends_its_case_with_the_reason_and_no_other(tmp_path: Path) -> None:
    class Failing(Simulated):
        def confirm(self, case: str, arm: str, **how: Any) -> Confirmation:
            if case == "short/fp32":
                raise LabError("the audit did not start")
            return super().confirm(case, arm, **how)

    engine = Failing({"BLOCK=1": 0.06})
    for _ in range(MOST_ATTEMPTS - 1):
        with pytest.raises(LabError, match="the audit did not start"):
            tune(tmp_path / "t", engine)
    state = tune(tmp_path / "t", engine)
    assert state.finished
    assert [each.case for each in state.winners] == ["long/fp32"]
    row = case_row(state, state.cases["short/fp32"])
    assert row.outcome == "its confirmation failed: the audit did not start"
