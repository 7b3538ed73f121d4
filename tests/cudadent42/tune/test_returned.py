"""What a fleet's worker brings back: what is its machine's fault is no arm's."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated import setup

from cudadent42.fleet.task import Block, Returned
from cudadent42.tune import journal as events
from cudadent42.tune.journal import Entry
from cudadent42.tune.prune import CompiledArm
from cudadent42.tune.returned import race_returned
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import Job, State, fold

TIME = "2026-01-01T00:00:00+00:00"
ABOUT = setup(arms=2)
CASE = ABOUT.plan.cases[0].id
NAMES = {implementation: arm for arm, implementation in ABOUT.arms.items()}
UNFIT = {f"{DEFAULT}.toml": "CUDA error", "BLOCK=1.toml": "CUDA error"}


def told(blocks: int) -> list[events.Event]:
    """With so many blocks of the case's first job."""
    code = {case.id: "" for case in ABOUT.plan.cases}
    said: list[events.Event] = [
        events.Compiled(CompiledArm(arm, dict.fromkeys(code, f"code of {arm}"))) for arm in ABOUT.arms
    ]
    said.append(events.JobStarted(f"{CASE}#0.0", 1, CASE, ("BLOCK=0", "BLOCK=1"), 1, "races/x"))
    said += [
        events.BlockMeasured(f"{CASE}#0.0", 1, number, {DEFAULT: 1.0, "BLOCK=0": 1.0, "BLOCK=1": 1.0}, "")
        for number in range(blocks)
    ]
    return said


def standing(blocks: int) -> State:
    return fold(ABOUT, [Entry(TIME, 1.0, each) for each in told(blocks)])


@pytest.mark.parametrize("before", [0, 3])
def test_a_default_that_was_raced_before_is_not_what_fails(tmp_path: Path, before: int) -> None:
    job = Job(f"{CASE}#0.0", CASE, 0, ("BLOCK=0", "BLOCK=1"), 6 - before, 2)
    returned = race_returned(standing(before), NAMES, tmp_path, job, Returned("key", "w", 1.0, (), UNFIT, ""))
    if before:
        assert returned.unfit == {}
        assert returned.error == f"the default was raced on {CASE} before, and cannot be now: CUDA error"
    else:
        assert returned.unfit == {DEFAULT: "CUDA error", "BLOCK=1": "CUDA error"}
        assert returned.error == ""


def test_an_arm_that_does_not_fit_is_out_whatever_was_raced_before(tmp_path: Path) -> None:
    job = Job(f"{CASE}#0.0", CASE, 0, ("BLOCK=0", "BLOCK=1"), 1, 2)
    block = Block(0, {f"{DEFAULT}.toml": 1.0, "BLOCK=0.toml": 1.0}, "")
    change = Returned("key", "w", 1.0, (block,), {"BLOCK=1.toml": "it is wrong"}, "")
    returned = race_returned(standing(3), NAMES, tmp_path, job, change)
    assert (returned.unfit, returned.error) == ({"BLOCK=1": "it is wrong"}, "")


def test_what_a_full_disk_cut_short_counts_as_far_as_it_came_and_as_no_failure(tmp_path: Path) -> None:
    job = Job(f"{CASE}#0.0", CASE, 0, ("BLOCK=0", "BLOCK=1"), 6, 1)
    block = Block(0, dict.fromkeys(NAMES, 1.0), "")
    change = Returned("key", "w", 1.0, (block,), {}, "No space left on device", unwritable=True)
    returned = race_returned(standing(0), NAMES, tmp_path, job, change)
    state = fold(ABOUT, [*(Entry(TIME, 1.0, each) for each in told(0)), Entry(TIME, 2.0, returned)])
    done = state.jobs[job.name]
    assert (done.blocks, done.failures, done.losses) == (1, 0, 0)
