"""What a race's turns come to: the interval, and what copying takes."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import comb

import pytest

from cudadent42.audit.messages import Pace
from cudadent42.audit.race import BLOCKS, GPU_BLOCKS, SHARE_OUTSIDE, _Block, _race, outer_rank
from cudadent42.model.integrity import Way


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
