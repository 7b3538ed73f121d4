"""How many claims are audited follows from what is to be met, and with which probability."""

from __future__ import annotations

import itertools
from collections import Counter
from math import ceil, exp
from random import Random

import pytest

from cudadent42.decisions.sampling import (
    POWER,
    UNTRUE_SHARE,
    chance_to_meet,
    chance_to_meet_by_number,
    drawn_by_gain,
    highest_first,
    sample_size,
)


@pytest.mark.parametrize(("claims", "sampled"), [(1, 1), (3, 2), (6, 3), (7, 5), (9, 2)])
def test_the_chance_by_number_is_that_of_all_samples(claims: int, sampled: int) -> None:
    untrue = set(range(ceil(UNTRUE_SHARE * claims)))
    samples = list(itertools.combinations(range(claims), sampled))
    met = sum(bool(untrue.intersection(sample)) for sample in samples)
    assert chance_to_meet_by_number(claims, sampled) == pytest.approx(met / len(samples))


@pytest.mark.parametrize("claims", range(1, 200))
def test_the_size_is_the_fewest_that_have_the_power(claims: int) -> None:
    size = sample_size(claims)
    assert chance_to_meet(claims, size) >= POWER
    assert size <= 8
    assert size == 1 or chance_to_meet(claims, size - 1) < POWER


@pytest.mark.parametrize(
    "gains",
    [
        [1.0] * 12,
        [10.0, *[0.1] * 11],  # one untrue claim that makes most of the headline
        [4.0, 2.0, 1.0, 1.0, 1.0, 1.0, 2.0],
    ],
)
@pytest.mark.parametrize("sampled", [1, 2, 4])
def test_untrue_gain_is_met_as_often_as_is_said(gains: list[float], sampled: int) -> None:
    """The first claims are untrue that have a third of all gain together."""
    untrue = next(n for n in range(1, 12) if sum(gains[:n]) >= UNTRUE_SHARE * sum(gains))
    speedups = [exp(gain / 10.0) for gain in gains]
    rounds, chance = 4000, Random(sampled)
    met = sum(min(drawn_by_gain(speedups, chance)[:sampled]) < untrue for _ in range(rounds))
    assert met / rounds > chance_to_meet(len(gains), sampled) - 0.03


def test_the_first_is_drawn_in_proportion_to_its_gain() -> None:
    speedups, chance = [exp(0.1), exp(0.2), exp(0.7), 0.5, 1.0], Random(1)
    first = Counter(drawn_by_gain(speedups, chance)[0] for _ in range(5000))
    assert first[2] / 5000 == pytest.approx(0.7, abs=0.03)
    assert first[0] / 5000 == pytest.approx(0.1, abs=0.03)
    assert sorted(drawn_by_gain(speedups, chance)) == [0, 1, 2, 3, 4]


def test_the_highest_speed_up_is_always_the_first_and_the_others_are_drawn() -> None:
    speedups, chance = [2.0, 2.0, 5.0, 2.0], Random(1)
    orders = [highest_first(speedups, chance) for _ in range(300)]
    assert {order[0] for order in orders} == {2}
    assert {order[1] for order in orders} == {0, 1, 3}
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert highest_first([], chance) == []
