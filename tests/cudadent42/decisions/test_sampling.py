"""How many claims are audited follows from what is to be met, and with which probability."""

from __future__ import annotations

import itertools
from math import ceil

import pytest

from cudadent42.decisions.sampling import POWER, UNTRUE_SHARE, chance_to_meet, sample_size


@pytest.mark.parametrize(("claims", "sampled"), [(1, 1), (3, 2), (6, 3), (7, 5), (9, 2)])
def test_the_chance_is_that_of_all_samples(claims: int, sampled: int) -> None:
    untrue = set(range(ceil(UNTRUE_SHARE * claims)))
    samples = list(itertools.combinations(range(claims), sampled))
    met = sum(bool(untrue.intersection(sample)) for sample in samples)
    assert chance_to_meet(claims, sampled) == pytest.approx(met / len(samples))


@pytest.mark.parametrize("claims", range(1, 200))
def test_the_size_is_the_fewest_that_have_the_power(claims: int) -> None:
    size = sample_size(claims)
    assert chance_to_meet(claims, size) >= POWER
    assert size <= 8
    assert size == 1 or chance_to_meet(claims, size - 1) < POWER
