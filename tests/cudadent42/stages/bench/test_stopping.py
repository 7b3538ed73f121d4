from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cudadent42.model.records import Plan
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.stages.bench.stopping import (
    MIN_PRECISION_BLOCKS,
    PILOT_BLOCKS,
    PILOT_SKIPPED,
    Pace,
    pilot_blocks,
)

CASES = tuple(AttentionCase(name, "bf16", 1, 1, 1, 64, 64, 64) for name in ("a", "b"))
PLAN = Plan("test", "cpu", CASES, "base", ("base", "mine"), 100, 3, seed=3, margin=0.01)


def fill(pace: Pace, jitter: float, blocks: int, case: str = "a/bf16") -> None:
    random = np.random.default_rng(5)
    for _ in range(blocks):
        base, mine = np.exp(random.normal(0.0, jitter, 2))
        pace.measured(case, {"base": base, "base_control": base, "mine": 0.5 * mine})


def test_precision_is_reached_by_width_alone() -> None:
    """A difference of a factor of two stops nothing; a narrow interval does."""
    wide, narrow = (Pace(replace(PLAN, precision=0.01)) for _ in range(2))
    fill(wide, 0.2, 60)
    fill(narrow, 0.001, 60)
    assert not wide.precise("a/bf16")
    assert narrow.precise("a/bf16")
    assert not narrow.precise("b/bf16")


def test_few_blocks_are_never_precise() -> None:
    pace = Pace(replace(PLAN, precision=0.5))
    fill(pace, 1e-6, MIN_PRECISION_BLOCKS - 1)
    assert not pace.precise("a/bf16")
    fill(pace, 1e-6, 1)
    assert pace.precise("a/bf16")


def test_without_a_precision_nothing_stops_early() -> None:
    pace = Pace(PLAN)
    fill(pace, 1e-6, 100)
    assert not pace.precise("a/bf16")


def warmed(plan: Plan, jitter: float, blocks: int) -> Pace:
    pace = Pace(plan)
    random = np.random.default_rng(6)
    for case in plan.cases:
        for _ in range(blocks):
            base, mine = np.exp(random.normal(0.0, jitter / 2**0.5, 2))
            pace.warmed_up(case.id, {"base": base, "base_control": base, "mine": mine}, 0.5)
    return pace


def test_forecast_names_blocks_and_time() -> None:
    """A spread of 2.2 % needs (2.8 x 1.14 x 2.2)^2 = 49 blocks for the 1 % beyond the margin, each of 2 x 0.5 s."""
    line = warmed(PLAN, 0.022, 400).forecast()
    words = line.split()
    blocks = int(words[words.index("blocks") - 1])
    assert blocks == pytest.approx(49, rel=0.2)
    assert f"about {blocks} s" in line
    assert line.startswith(
        f"a typical case needs {blocks} blocks (about {blocks} s) to call a difference of 2.0% "
    )
    assert "the 100 planned take about 100 s and call one of 1.7%" in line


def test_forecast_without_a_margin_has_no_number_of_blocks() -> None:
    line = warmed(replace(PLAN, margin=0.0), 0.022, 400).forecast()
    assert line.startswith("the 100 planned take about 100 s and call one of 0.7%")


def test_forecast_of_a_race_that_stops_on_precision() -> None:
    line = warmed(replace(PLAN, precision=0.005, budget_s=40.0), 0.02, 40).forecast()
    assert line.endswith("measuring until intervals of ±0.50%, about 40 s at most")


def test_no_forecast_from_nothing() -> None:
    assert Pace(PLAN).forecast() == ""
    assert warmed(PLAN, 0.02, PILOT_SKIPPED + 2).forecast() == ""


def test_pilot_is_the_warm_up_or_what_the_forecast_needs() -> None:
    assert pilot_blocks(PLAN) == PILOT_BLOCKS // 2 + PILOT_SKIPPED
    assert pilot_blocks(replace(PLAN, repeats=25)) == 6  # a quarter of the run at most
    assert pilot_blocks(replace(PLAN, warmup=20)) == 20
    assert pilot_blocks(replace(PLAN, warmup=0)) == 0
