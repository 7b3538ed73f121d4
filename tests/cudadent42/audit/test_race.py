"""What a race's turns come to: the interval, and what copying takes."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from math import comb

import pytest
import torch

from cudadent42.audit.messages import Pace
from cudadent42.audit.prepared import _enlarge_rows
from cudadent42.audit.race import (
    BLOCKS,
    GPU_BLOCKS,
    SHARE_OUTSIDE,
    _Block,
    _race,
    of_large_values,
    outer_rank,
)
from cudadent42.model.integrity import Way
from cudadent42.model.records import ErrorNorms, VerifiedCase


@pytest.mark.parametrize("blocks", [6, BLOCKS, 13, GPU_BLOCKS, 100])
def test_the_interval_holds_the_median_as_often_as_it_says(blocks: int) -> None:
    """By the sign test: outside lies the median where so few differences are above it, or below."""

    def outside(rank: int) -> Fraction:
        return Fraction(2 * sum(comb(blocks, below) for below in range(rank + 1)), 2**blocks)

    rank = outer_rank(blocks)
    assert outside(rank) <= Fraction(SHARE_OUTSIDE)
    assert outside(rank + 1) > Fraction(SHARE_OUTSIDE)


def test_what_copying_takes_is_in_no_saving_where_both_copy_alike() -> None:
    copies = itertools.cycle([{Pace.COPIES: 5.0, Pace.PREPARED_COPIES: 7.0}, {}, {}, {}])
    blocks = [_Block(10.0 + n / 100, 8.0, next(copies)) for n in range(BLOCKS)]
    race = _race(blocks, (), Way.SHARED, calls=3)
    assert race.saved_ms == pytest.approx([2.0 + n / 100 for n in range(BLOCKS)])
    assert race.candidate_ms == pytest.approx(2.0)  # 8 less the middle of what copying took
    assert race.compared == 3 * BLOCKS


def test_a_baseline_that_is_prepared_for_each_call_is_without_that() -> None:
    blocks = [_Block(10.0, 8.0, {Pace.COPIES: 1.0, Pace.PREPARED_COPIES: 4.0})] * BLOCKS
    race = _race(blocks, (), Way.SHARED, calls=1)
    assert (race.baseline_ms, race.candidate_ms, race.saved) == pytest.approx((6.0, 7.0, -1.0))


def test_a_result_of_large_values_is_held_to_wider_bounds_and_a_number_that_is_none_to_none() -> None:
    bound = ErrorNorms(1.0, 0.1, 0.5)

    def judged(error: ErrorNorms | None) -> VerifiedCase:
        return VerifiedCase("a", "mine", "audited", error, bound, bound, False, "over the bound")

    assert of_large_values(judged(ErrorNorms(7.9, 0.79, 3.9))).passed
    assert not of_large_values(judged(ErrorNorms(8.1, 0.1, 0.5))).passed
    assert not of_large_values(judged(ErrorNorms(1.0, 0.81, 0.5))).passed
    assert not of_large_values(judged(ErrorNorms(1.0, 0.1, math.nan))).passed
    assert not of_large_values(judged(None)).passed


@pytest.mark.parametrize(("shape", "most"), [((2, 3, 5, 8), 4), ((1, 1, 2, 8), 2)])
def test_a_few_rows_are_large_and_the_same_ones_for_the_judge(shape: tuple[int, ...], most: int) -> None:
    tensors = [torch.ones(shape).transpose(1, 2) for _ in range(2)]
    for tensor in tensors:
        _enlarge_rows(tensor, 64.0, seed=7)
    assert torch.equal(*tensors)
    rows = tensors[0].reshape(-1, 8)
    assert sorted(rows.unique().tolist()) == ([1.0, 64.0] if most < len(rows) else [64.0])
    assert int((rows == 64.0).all(1).sum()) == most
