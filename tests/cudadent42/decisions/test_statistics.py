"""The statistics under the noise that machines have: how often they cry wolf, and what they can see."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cudadent42.decisions.margin import default_margin, lower, upper
from cudadent42.decisions.schedule import block_orders
from cudadent42.decisions.statistics import (
    CENTRE_FACTOR,
    RatioEstimate,
    centre,
    estimate_ratio,
    geometric_mean,
    minimum_detectable_effect,
    noise_floor,
)
from cudadent42.decisions.verdicts import decide, decide_many, discoveries
from cudadent42.model.records import Verdict

Floats = NDArray[np.float64]

BLOCKS = 25
TRIALS = 300
RESAMPLES = 600

# ---------------------------------------------------------------- machines


def steady(random: np.random.Generator, calls: int) -> Floats:
    """1 % jitter."""
    return np.exp(random.normal(0.0, 0.01, calls))


def spiky(random: np.random.Generator, calls: int) -> Floats:
    """1 % jitter, and one call in ten is delayed by 5 to 100 %."""
    delay = np.where(random.random(calls) < 0.1, random.uniform(0.05, 1.0, calls), 0.0)
    return steady(random, calls) * (1.0 + delay)


def drifting(random: np.random.Generator, calls: int) -> Floats:
    """1 % jitter on a clock that loses 5 % over the case."""
    return steady(random, calls) * np.linspace(1.0, 1.05, calls)


def stepping(random: np.random.Generator, calls: int) -> Floats:
    """1 % jitter, and the clock falls by 4 % somewhere."""
    step = np.where(np.arange(calls) >= random.integers(0, calls), 1.04, 1.0)
    return steady(random, calls) * step


def two_speeds(random: np.random.Generator, calls: int) -> Floats:
    """Each call is at one of two speeds 5 % apart, as with a neighbour that comes and goes."""
    return steady(random, calls) * np.where(random.random(calls) < 0.4, 1.05, 1.0)


MACHINES = [steady, spiky, drifting, stepping, two_speeds]
Machine = Callable[[np.random.Generator, int], Floats]


def race(machine: Machine, speedup: float, seed: int) -> RatioEstimate:
    """One case: a baseline and a candidate in mirrored blocks, the candidate ``speedup`` times as fast."""
    random = np.random.default_rng(seed)
    noise = machine(random, 2 * BLOCKS)
    orders = block_orders(["baseline", "candidate"], BLOCKS, seed, "case")
    baseline, candidate = np.empty(BLOCKS), np.empty(BLOCKS)
    for block, order in enumerate(orders):
        for position, name in enumerate(order):
            latency = noise[2 * block + position]
            if name == "baseline":
                baseline[block] = latency
            else:
                candidate[block] = latency / speedup
    return estimate_ratio(baseline, candidate, seed, RESAMPLES)


def share(machine: Machine, speedup: float, verdict: Verdict, margin: float) -> float:
    verdicts = [decide(race(machine, speedup, seed), margin) for seed in range(TRIALS)]
    return sum(each is verdict for each in verdicts) / TRIALS


@pytest.mark.parametrize("machine", MACHINES)
def test_same_code_is_not_called_different(machine: Machine) -> None:
    """A margin that is twice the jitter leaves nothing of the nominal 5 %."""
    estimates = [race(machine, 1.0, seed) for seed in range(TRIALS)]
    called = [decide(e, default_margin("cpu")) in (Verdict.FASTER, Verdict.SLOWER) for e in estimates]
    assert sum(called) / TRIALS <= 0.01


@pytest.mark.parametrize("machine", MACHINES)
def test_interval_covers_the_truth(machine: Machine) -> None:
    """Without any margin, intervals of 95 % miss a ratio of 1.1 about one time in twenty."""
    intervals = [race(machine, 1.1, seed).interval() for seed in range(TRIALS)]
    missed = sum(not low <= 1.1 <= high for low, high in intervals) / TRIALS
    assert missed <= 0.09  # 300 trials at 5 %: 0.09 is three standard errors above


@pytest.mark.parametrize("machine", [steady, spiky, drifting])
def test_real_differences_are_seen(machine: Machine) -> None:
    assert share(machine, 1.06, Verdict.FASTER, 0.02) >= 0.9
    assert share(machine, 1 / 1.06, Verdict.SLOWER, 0.02) >= 0.9


def test_equal_is_reached_on_a_steady_machine() -> None:
    assert share(steady, 1.0, Verdict.EQUAL, 0.02) >= 0.9


def test_difference_of_half_the_margin_is_never_called() -> None:
    assert share(steady, 1.01, Verdict.FASTER, 0.02) <= 0.01


# ---------------------------------------------------------------- properties


LATENCIES = st.lists(st.floats(1e-3, 1e3), min_size=8, max_size=30)


@settings(max_examples=50)
@given(LATENCIES, st.floats(0.1, 10.0))
def test_scaling_both_sides_changes_nothing(values: list[float], factor: float) -> None:
    baseline = np.array(values)
    candidate = np.array(values[::-1])
    one = estimate_ratio(baseline, candidate, 3, 200)
    other = estimate_ratio(baseline * factor, candidate * factor, 3, 200)
    np.testing.assert_allclose(one.resampled, other.resampled)


@settings(max_examples=50)
@given(LATENCIES, st.floats(0.0, 0.2))
def test_exchanging_the_sides_exchanges_the_verdict(values: list[float], margin: float) -> None:
    one = np.array(values)
    other = np.array(values[::-1]) * 1.1
    opposite = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER}
    forward = decide(estimate_ratio(one, other, 3, 400), margin)
    backward = decide(estimate_ratio(other, one, 3, 400), margin)
    undecided_or_equal = {forward, backward} <= {Verdict.UNDECIDED, Verdict.EQUAL}
    assert backward is opposite.get(forward, backward) or undecided_or_equal


@given(LATENCIES)
def test_interval_holds_the_estimate_of_exact_pairs(values: list[float]) -> None:
    baseline = np.array(values)
    estimate = estimate_ratio(baseline, baseline / 2.0, 0, 100)
    assert estimate.ratio == pytest.approx(2.0)
    assert estimate.interval() == pytest.approx((2.0, 2.0))


def test_same_seed_same_interval() -> None:
    random = np.random.default_rng(0)
    baseline, candidate = random.random(25) + 1.0, random.random(25) + 1.0
    assert (
        estimate_ratio(baseline, candidate, 9).interval() == estimate_ratio(baseline, candidate, 9).interval()
    )
    assert (
        estimate_ratio(baseline, candidate, 9).interval() != estimate_ratio(baseline, candidate, 8).interval()
    )


@settings(max_examples=50)
@given(
    st.lists(st.sampled_from([0.5, 0.9, 1.0, 1.0, 1.1, 3.0]) | st.floats(1e-3, 1e3), min_size=1, max_size=40)
)
def test_a_resample_is_the_centre_of_what_was_drawn(values: list[float]) -> None:
    """To the bit, equal values included: old results are computed again and compared."""
    baseline, candidate = np.array(values), np.roll(np.array(values), 1)
    logs = np.log(baseline / candidate)
    drawn = logs[np.random.default_rng(5).integers(0, logs.size, size=(100, logs.size))]
    estimate = estimate_ratio(baseline, candidate, 5, 100)
    np.testing.assert_array_equal(estimate.resampled, np.exp(centre(drawn)))


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="equally long"):
        estimate_ratio(np.ones(3), np.ones(4), 0)


def test_geometric_mean() -> None:
    estimates = [RatioEstimate(ratio, np.full(100, ratio), 25) for ratio in (2.0, 8.0)]
    mean = geometric_mean(estimates)
    assert mean.ratio == pytest.approx(4.0)
    assert mean.interval() == pytest.approx((4.0, 4.0))
    assert np.isnan(geometric_mean([]).ratio)


# ---------------------------------------------------------------- decisions


def spread(low: float, high: float, blocks: int = 25) -> RatioEstimate:
    return RatioEstimate((low + high) / 2, np.linspace(low, high, 1001), blocks)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.05, 1.10, Verdict.FASTER),
        (0.90, 0.95, Verdict.SLOWER),
        (0.99, 1.01, Verdict.EQUAL),
        (1.00, 1.05, Verdict.UNDECIDED),
        (1.01, 1.04, Verdict.UNDECIDED),
        (0.80, 1.30, Verdict.UNDECIDED),
    ],
)
def test_four_words(low: float, high: float, verdict: Verdict) -> None:
    assert decide(spread(low, high), 0.02) is verdict


def test_too_few_blocks_decide_nothing() -> None:
    assert decide(spread(2.0, 3.0, blocks=5), 0.02) is Verdict.UNDECIDED


def test_difference_within_the_control_s_own_is_not_called() -> None:
    assert decide(spread(1.05, 1.10), 0.02, control_offset=0.07) is Verdict.UNDECIDED
    assert decide(spread(1.08, 1.10), 0.02, control_offset=0.07) is Verdict.FASTER


def test_equal_is_not_claimed_where_the_control_differs_by_more() -> None:
    assert decide(spread(0.998, 1.002), 0.02) is Verdict.EQUAL
    assert decide(spread(0.998, 1.002), 0.02, control_offset=0.025) is Verdict.EQUAL
    assert decide(spread(0.985, 1.015), 0.02, control_offset=0.035) is Verdict.UNDECIDED
    assert decide(spread(0.998, 1.002), 0.02, control_offset=0.07) is Verdict.UNDECIDED


def test_benjamini_hochberg_worked_example() -> None:
    """Fifteen p-values of Benjamini and Hochberg (1995), section 3: four survive at 5 %."""
    p_values = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344]
    p_values += [0.0459, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0000]
    assert discoveries(p_values, 0.05) == [True] * 4 + [False] * 11
    assert discoveries([], 0.05) == []


def test_one_narrow_call_among_many_does_not_survive() -> None:
    narrow = spread(1.0193, 1.06)  # 2 % of the resamples below the margin: alone it is called
    assert decide(narrow, 0.02) is Verdict.FASTER
    verdicts = decide_many([narrow] + [spread(0.97, 1.03)] * 23, 0.02, [0.0] * 24)
    assert verdicts[0] is Verdict.UNDECIDED


def test_noise_floor_is_near_the_largest_control_ratio() -> None:
    assert noise_floor([1.0] * 19 + [0.9]) == pytest.approx(0.005, abs=1e-9)
    assert np.isnan(noise_floor([]))


def test_margins_mirror() -> None:
    assert default_margin("cuda:1") == 0.01
    assert upper(0.25) == 1.25
    assert lower(0.25) == 0.8


def test_minimum_detectable_effect_follows_the_blocks() -> None:
    random = np.random.default_rng(1)
    few, many = (random.normal(1.0, 0.01, n) for n in (100, 10_000))
    small = minimum_detectable_effect(many, np.ones(10_000))
    assert small == pytest.approx(2.8 * CENTRE_FACTOR * 0.01 / 100, rel=0.05)
    assert minimum_detectable_effect(few, np.ones(100)) > 5 * small
