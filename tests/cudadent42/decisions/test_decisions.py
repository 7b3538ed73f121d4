"""Whole decisions under simulated noise: how often the same code is called different, and what is found.

The fast form asks for rates that only a broken rule misses; the slow one measures them to about a percent.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from cudadent42.decisions.margin import smallest_called, upper
from cudadent42.decisions.schedule import block_orders
from cudadent42.decisions.statistics import (
    blocks_for,
    detectable_effect,
    estimate_ratio,
    half_width,
    spread_of,
)
from cudadent42.decisions.verdicts import decide
from cudadent42.model.records import Verdict
from cudadent42.stages.bench.stopping import MIN_PRECISION_BLOCKS

Floats = NDArray[np.float64]
Machine = Callable[[np.random.Generator, int], Floats]

JITTER = 0.005
BLOCKS = 60
RESAMPLES = 600
MARGIN = 0.01
DIFFERENT = (Verdict.FASTER, Verdict.SLOWER)


def independent(random: np.random.Generator, calls: int) -> Floats:
    """Jitter, and three calls in a hundred delayed by about a tenth."""
    delayed = np.where(random.random(calls) < 0.03, random.uniform(0.05, 0.15, calls), 0.0)
    return np.exp(random.normal(0.0, JITTER, calls)) * (1.0 + delayed)


def drift(random: np.random.Generator, calls: int) -> Floats:
    """The same on a clock that loses 3 % over the race."""
    return independent(random, calls) * np.linspace(1.0, 1.03, calls)


def steps(random: np.random.Generator, calls: int) -> Floats:
    """The same on a clock that falls and rises by 4 %, five times in the race."""
    edges = np.sort(random.integers(0, calls, 5))
    return independent(random, calls) * np.where(np.searchsorted(edges, np.arange(calls)) % 2, 1.04, 1.0)


MACHINES = [independent, drift, steps]


def race(machine: Machine, slowdown: float, seed: int, blocks: int) -> tuple[Floats, Floats]:
    """Latencies of a baseline and of a candidate that takes ``1 + slowdown`` times as long."""
    random = np.random.default_rng(seed)
    noise = machine(random, 3 * blocks)
    rows = {"base": np.empty(blocks), "base_control": np.empty(blocks), "rival": np.empty(blocks)}
    for block, order in enumerate(block_orders(list(rows), blocks, seed, "case")):
        for position, name in enumerate(order):
            rows[name][block] = noise[3 * block + position]
    return rows["base"], rows["rival"] * (1.0 + slowdown)


def stopped(base: Floats, rival: Floats, precision: float) -> int:
    """Blocks after which a race with this precision ends."""
    for blocks in range(MIN_PRECISION_BLOCKS, base.size, 6):
        if half_width(base[:blocks], rival[:blocks]) <= precision:
            return blocks
    return base.size


def share_of(
    words: tuple[Verdict, ...],
    machine: Machine,
    slowdown: float,
    margin: float,
    trials: int,
    precision: float = 0.0,
    blocks: int = BLOCKS,
) -> float:
    decided = 0
    for seed in range(trials):
        base, rival = race(machine, slowdown, seed, blocks)
        used = stopped(base, rival, precision) if precision else blocks
        estimate = estimate_ratio(base[:used], rival[:used], seed, RESAMPLES)
        decided += decide(estimate, margin) in words
    return decided / trials


@pytest.mark.parametrize("machine", MACHINES)
class TestFast:
    trials = 150

    def test_same_code(self, machine: Machine) -> None:
        """Without a margin about 5 % of A/A races are called; with one none. 150 races at 5 %: 11 % is 3.4 standard
        errors above."""
        assert share_of(DIFFERENT, machine, 0.0, 0.0, self.trials) <= 0.11
        assert share_of(DIFFERENT, machine, 0.0, MARGIN, self.trials) == 0.0

    def test_true_differences(self, machine: Machine) -> None:
        assert share_of((Verdict.SLOWER,), machine, 0.01, 0.0, self.trials) >= 0.97
        assert share_of((Verdict.SLOWER,), machine, 0.03, MARGIN, self.trials) >= 0.97

    def test_stopping_on_a_width_calls_no_more(self, machine: Machine) -> None:
        assert share_of(DIFFERENT, machine, 0.0, 0.0, 60, precision=0.0025) <= 0.15


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machine", MACHINES)
class TestFull:
    trials = 2000

    def test_false_calls_are_nominal(self, machine: Machine) -> None:
        """5 %, within 3 standard errors of 0.5 % and a point for the bootstrap's own error at 60 blocks."""
        assert 0.03 <= share_of(DIFFERENT, machine, 0.0, 0.0, self.trials) <= 0.075

    def test_false_calls_are_nominal_when_stopped_on_a_width(self, machine: Machine) -> None:
        assert share_of(DIFFERENT, machine, 0.0, 0.0, self.trials, precision=0.0025) <= 0.085

    def test_a_margin_leaves_none_of_them(self, machine: Machine) -> None:
        assert share_of(DIFFERENT, machine, 0.0, MARGIN, self.trials) <= 0.001

    def test_power(self, machine: Machine) -> None:
        assert share_of((Verdict.SLOWER,), machine, 0.01, 0.0, self.trials) >= 0.99
        assert share_of((Verdict.SLOWER,), machine, 0.03, MARGIN, self.trials) >= 0.99

    def test_power_at_the_margin_is_small(self, machine: Machine) -> None:
        assert share_of((Verdict.SLOWER,), machine, MARGIN, MARGIN, self.trials) <= 0.06


@pytest.mark.parametrize("margin", [0.0, MARGIN])
def test_what_is_promised_before_a_run_is_called_four_times_out_of_five(margin: float) -> None:
    """At the spread that this machine has."""
    base, rival = race(independent, 0.0, 0, 5000)
    effect = smallest_called(detectable_effect(spread_of(base, rival), BLOCKS), margin)
    assert 0.65 <= share_of((Verdict.SLOWER,), independent, effect, margin, 200) <= 0.95


def test_the_blocks_that_are_said_to_call_twice_the_margin_do() -> None:
    base, rival = race(independent, 0.0, 0, 5000)
    margin = 0.002  # so small that it takes about as many blocks as are raced here
    blocks = blocks_for(upper(2 * margin) / upper(margin) - 1.0, spread_of(base, rival))
    assert 0.5 * BLOCKS < blocks < 4 * BLOCKS
    assert 0.65 <= share_of((Verdict.SLOWER,), independent, 2 * margin, margin, 200, blocks=blocks) <= 0.95
