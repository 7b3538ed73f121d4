"""Races in rungs, simulated: what is lost, what it costs, and Student's t against its tables."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.decisions.racing import (
    Cause,
    Row,
    Rules,
    blocks_of,
    chunks,
    difference,
    exhaustive,
    gain,
    gains_too_little,
    is_decided,
    leader_of,
    leaving,
    unseparated,
)
from cudadent42.decisions.student import quantile, upper_tail

DEFAULT = "default"


@pytest.mark.parametrize(
    ("tail", "degrees", "value"),
    [  # R's qt(1 - tail, degrees), which tables print
        (0.025, 1, 12.7062),
        (0.025, 3, 3.18245),
        (0.005, 5, 4.03214),
        (0.0005, 10, 4.58689),
        (0.05, 30, 1.69726),
        (0.025, 1e6, 1.95997),
    ],
)
def test_quantiles_are_those_of_the_tables(tail: float, degrees: float, value: float) -> None:
    assert quantile(tail, degrees) == pytest.approx(value, rel=1e-5)


@given(st.floats(1e-8, 0.5), st.floats(1.0, 300.0))
def test_a_quantile_has_its_tail(tail: float, degrees: float) -> None:
    assert upper_tail(quantile(tail, degrees), degrees) == pytest.approx(tail, rel=1e-6)
    assert upper_tail(-1.5, degrees) == pytest.approx(1.0 - upper_tail(1.5, degrees))


def test_a_quantile_of_no_probability_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a tail"):
        quantile(0.7, 5)


def rows_of(values: Mapping[str, np.ndarray]) -> dict[str, Row]:
    return {arm: {str(i): float(x) for i, x in enumerate(row)} for arm, row in values.items()} | {DEFAULT: {}}


def test_arms_of_one_job_are_compared_in_pairs_and_others_by_way_of_the_default() -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, 12)
    shared = rows_of({"a": noise + 0.01, "b": noise})
    paired = difference(shared["a"], shared["b"], 0.01)
    assert paired.paired
    assert paired.centre == pytest.approx(0.01)
    assert paired.half_width < 1e-6
    other = {f"other-{block}": value for block, value in shared["b"].items()}
    apart = difference(shared["a"], other, 0.01)
    assert not apart.paired
    assert apart.half_width > 0.01
    assert math.isinf(difference(shared["a"], {"x": 0.0}, 0.01).half_width)


def test_intervals_of_a_race_hold_what_they_promise() -> None:
    """Of 4,000 gains with a spike in one block of fifteen, as many lie outside as the level says, or fewer."""
    random = np.random.default_rng(1)
    outside = 0
    for _ in range(4000):
        noise = random.normal(0.0, 0.01, 18) - np.where(random.random(18) < 1 / 15, 0.2, 0.0)
        estimate = gain({str(i): x for i, x in enumerate(noise)}, 0.025)
        outside += not estimate.low <= 0.0 <= estimate.high
    # The centre of skewed noise lies a little off the mode; 5 % is nominal.
    assert outside / 4000 < 0.065


def race(
    means: Mapping[str, float],
    rules: Rules,
    random: np.random.Generator,
    *,
    spread: float = 0.01,
    per_job: int = 6,
) -> tuple[str, int]:
    """One simulated race: the leader at its end, and the blocks of arms that it took."""
    rows: dict[str, dict[str, float]] = {arm: {} for arm in means} | {DEFAULT: {}}
    alive = list(means)
    cost = 0
    for rung in range(len(rules.rungs)):
        for number, job in enumerate(chunks(alive, per_job)):
            for block in range(blocks_of(rules, rung)):
                shared = random.normal(0.0, spread / 2)
                for arm in job:
                    spike = 0.3 if random.random() < 0.02 else 0.0
                    rows[arm][f"{rung}/{number}/{block}"] = (
                        means[arm] + shared + random.normal(0.0, spread) - spike
                    )
                    cost += 1
        gone = {
            each.arm
            for each in leaving({arm: rows[arm] for arm in [DEFAULT, *alive]}, DEFAULT, len(means), rules)
        }
        alive = [arm for arm in alive if arm not in gone]
        if not alive:
            break
        if is_decided({arm: rows[arm] for arm in [DEFAULT, *alive]}, DEFAULT, len(means), rules):
            break
    return leader_of({arm: rows[arm] for arm in [DEFAULT, *alive]}, DEFAULT), cost


def test_the_best_arm_is_kept_and_a_race_costs_a_fifth_of_a_sweep() -> None:
    """24 arms, the best 6 % faster than the default and 1 % than the next: it, or one within 1 % of it, leads."""
    random = np.random.default_rng(2)
    rules = Rules(margin=0.02)
    kept, cost = 0, 0
    races = 200
    for _ in range(races):
        others = random.normal(-0.03, 0.03, 22)
        means = {f"a{i}": min(0.045, float(x)) for i, x in enumerate(others)} | {"best": 0.06, "next": 0.05}
        leader, spent = race(means, rules, random)
        kept += means.get(leader, 0.0) >= 0.05
        cost += spent
    assert kept / races >= 0.98
    assert cost / races <= exhaustive(24, rules) / 5


def test_two_hundred_arms_cost_a_fifth_of_a_sweep() -> None:
    random = np.random.default_rng(3)
    rules = Rules(rungs=(4, 12, 36, 108), margin=0.01)
    kept, cost = 0, 0
    for _ in range(20):
        means = {f"a{i}": float(x) for i, x in enumerate(random.normal(-0.10, 0.06, 199))}
        means = {arm: min(mean, 0.045) for arm, mean in means.items()} | {"best": 0.06}
        leader, spent = race(means, rules, random)
        kept += leader == "best"
        cost += spent
    assert kept == 20
    assert cost / 20 <= exhaustive(200, rules) / 10


def test_arms_that_are_the_default_leave() -> None:
    """Twelve arms of equal speed: the default leads, or an arm that no confirmation would call faster."""
    random = np.random.default_rng(4)
    rules = Rules(margin=0.02)
    costs = []
    for _ in range(50):
        _, spent = race({f"a{i}": 0.0 for i in range(12)}, rules, random)
        costs.append(spent)
    assert np.mean(costs) < exhaustive(12, rules) / 2


def test_why_an_arm_left_is_told() -> None:
    random = np.random.default_rng(5)
    values = {
        "best": random.normal(0.10, 0.002, 18),
        "slow": random.normal(-0.20, 0.002, 18),
        "middle": random.normal(0.05, 0.002, 18),
        **{f"near-{i}": random.normal(0.099, 0.002, 18) for i in range(6)},
    }
    gone = {each.arm: each for each in leaving(rows_of(values), DEFAULT, 9, Rules(margin=0.01))}
    assert gone["slow"].cause is Cause.NO_GAIN
    assert gone["slow"].than == DEFAULT
    assert gone["middle"].cause is Cause.SLOWER
    assert gone["middle"].ratio == pytest.approx(math.exp(-0.05), abs=0.01)
    assert gone["middle"].low < gone["middle"].ratio < gone["middle"].high < 1.0
    assert {each.cause for arm, each in gone.items() if arm.startswith("near")} == {Cause.CAP}
    assert len(values) - len(gone) == 3
    leader = leader_of(rows_of(values), DEFAULT)
    assert leader not in gone
    assert "slow" not in unseparated(rows_of(values), leader, DEFAULT, 9, Rules())
    assert [
        arm for arm in unseparated(rows_of(values), leader, DEFAULT, 9, Rules()) if arm.startswith("near")
    ]


def steady(*gains: float, spread: float = 0.002, blocks: int = 12) -> dict[str, dict[str, float]]:
    """Arms of these gains, whose noise is the same in each block but for a hundredth."""
    random = np.random.default_rng(7)
    shared = random.normal(0.0, spread, blocks)
    return rows_of(
        {f"a{i}": gain + shared + random.normal(0.0, spread / 100, blocks) for i, gain in enumerate(gains)}
    )


def test_a_race_is_over_when_nobody_left_can_be_better_by_what_matters() -> None:
    rules = Rules(margin=0.02, near=0.5)
    assert is_decided(steady(0.060, 0.0599, 0.059), DEFAULT, 3, rules)
    # Nobody beside it is left.
    assert is_decided(steady(0.060), DEFAULT, 3, rules)
    # The gain is not certain: it may be the margin.
    assert not is_decided(steady(0.021, 0.0209), DEFAULT, 3, rules)
    # The other may be better by more than half the margin, for all that is measured.
    apart = steady(0.060, 0.0599, spread=0.02, blocks=4)
    apart["a1"] = {f"other-{block}": value for block, value in apart["a1"].items()}
    assert not is_decided(apart, DEFAULT, 3, rules)
    # Nothing near is settled with this rule: one has to be left alone.
    assert not is_decided(steady(0.060, 0.060), DEFAULT, 3, Rules(margin=0.02, near=0.0))
    assert not is_decided(steady(-0.01, -0.02), DEFAULT, 3, rules)


def test_a_winner_whose_own_race_says_that_it_gains_too_little() -> None:
    rules = Rules(margin=0.02)
    assert gains_too_little(steady(0.010)["a0"], rules)
    assert not gains_too_little(steady(0.030)["a0"], rules)
    # It may be better by the margin, for all that is known: of a wide interval, of few blocks, or on other machines.
    assert not gains_too_little(steady(0.019, spread=0.01)["a0"], rules)
    assert not gains_too_little(steady(0.010, blocks=2)["a0"], rules)
    assert not gains_too_little(steady(0.018)["a0"], rules, between=0.005)


def test_a_spike_in_one_of_four_blocks_sends_nobody_away() -> None:
    """Ten arms, three of which stay at most: ranks go by the median while there are few blocks."""
    rows = steady(0.060, *(0.03 - 0.001 * i for i in range(9)), spread=0.004, blocks=4)
    rows["a0"] |= {"2": -0.4}
    gone = {each.arm for each in leaving(rows, DEFAULT, 10, Rules(rungs=(4, 12), margin=0.01))}
    assert "a0" not in gone
    assert len(gone) >= 6
    assert leader_of(rows, DEFAULT) == "a0"


def test_the_default_leads_where_nothing_is_faster() -> None:
    assert leader_of(rows_of({"a": np.full(6, -0.1)}), DEFAULT) == DEFAULT
    assert leader_of({DEFAULT: {}, "never-measured": {}}, DEFAULT) == DEFAULT


@given(st.lists(st.integers(0, 1000).map(str), unique=True, max_size=60), st.integers(1, 9))
def test_jobs_hold_each_arm_once_and_are_even(arms: list[str], most: int) -> None:
    parts = chunks(arms, most)
    assert [arm for part in parts for arm in part] == arms
    sizes = [len(part) for part in parts]
    assert not sizes or (max(sizes) <= most and max(sizes) - min(sizes) <= 1)
