"""How many blocks confirm a winner: as many as its race's noise and its distance from the margin ask for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.decisions.confirmation import LEAST, MOST, PRECISION, blocks_to_confirm
from cudadent42.decisions.racing import Rules
from cudadent42.decisions.statistics import estimate_ratio

RULES = Rules(margin=0.02)


def row(gain: float, spread: float, blocks: int = 12, seed: int = 0) -> dict[str, float]:
    """Whose mean and standard deviation are just these."""
    noise = np.random.default_rng(seed).normal(size=blocks)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    return {str(number): gain + spread * float(each) for number, each in enumerate(noise)}


def test_a_clear_winner_on_a_steady_machine_takes_the_fewest() -> None:
    assert blocks_to_confirm(row(0.06, 0.002), (), RULES) == LEAST


def test_noise_asks_for_more_and_the_last_word_is_the_most() -> None:
    sizes = [blocks_to_confirm(row(0.06, spread, 8), (), RULES) for spread in (0.004, 0.010, 0.015, 0.05)]
    assert sizes == sorted(sizes)
    assert sizes[0] == LEAST
    assert LEAST < sizes[1] < sizes[2]
    assert sizes[-1] == MOST


def test_what_lies_near_the_margin_is_measured_more_precisely() -> None:
    far, near = (blocks_to_confirm(row(gain, 0.005, 8), (), RULES) for gain in (0.06, 0.024))
    assert far == LEAST
    assert near > 2 * LEAST
    # What is not ahead by the margin at all is told from it by luck alone, and no blocks are spent on luck.
    assert blocks_to_confirm(row(0.015, 0.005, 8), (), RULES) == far


def test_a_spread_that_hardly_anything_is_known_of_counts_as_a_large_one() -> None:
    measured, guessed = (blocks_to_confirm(row(0.06, 0.008, blocks), (), RULES) for blocks in (9, 4))
    assert measured < guessed
    assert blocks_to_confirm({"0": 0.06, "1": 0.06}, (), RULES) == MOST
    assert blocks_to_confirm(row(0.06, 0.001), (), Rules(margin=0.0)) == MOST


def test_all_arms_tell_of_the_noise_and_a_spike_in_one_row_says_nothing() -> None:
    winner = row(0.06, 0.012, 4)
    others = [row(-0.1, 0.012, 4, seed) for seed in range(1, 7)]
    alone, among = blocks_to_confirm(winner, (), RULES), blocks_to_confirm(winner, others, RULES)
    assert LEAST < among < alone
    spiked = [*others[:-1], others[-1] | {"2": -0.6}]
    assert blocks_to_confirm(winner, spiked, RULES) == among
    assert blocks_to_confirm(winner, [row(-0.1, 0.03, 4, seed) for seed in range(1, 7)], RULES) > among
    # Rows that are too short say nothing.
    assert blocks_to_confirm(winner, [{"0": -0.1}], RULES) == alone


def test_the_spread_of_short_rows_is_not_taken_for_less_than_it_is() -> None:
    """The median of the variances of four blocks each is four fifths of the true one."""
    random = np.random.default_rng(11)
    sizes = []
    for _ in range(200):
        rows = [
            {str(block): 0.06 + float(each) for block, each in enumerate(random.normal(0.0, 0.012, 4))}
            for _ in range(9)
        ]
        sizes.append(blocks_to_confirm(row(0.06, 0.012, 4), rows, RULES))
    exact = blocks_to_confirm(row(0.06, 0.012, 28), (), RULES)
    assert np.mean(sizes) == pytest.approx(exact, rel=0.15)


@given(st.floats(-0.5, 0.5), st.floats(0.0, 0.2), st.integers(3, 40), st.sampled_from([0.0, 0.005, 0.02]))
def test_sizes_are_even_and_within_their_bounds(
    gain: float, spread: float, blocks: int, margin: float
) -> None:
    size = blocks_to_confirm(row(gain, spread, blocks), (), Rules(margin=margin))
    assert LEAST <= size <= MOST
    assert size % 2 == 0


@pytest.mark.parametrize("spread", [0.004, 0.01])
def test_intervals_come_out_as_narrow_as_they_were_asked_for(spread: float) -> None:
    random = np.random.default_rng(3)
    narrow = 0
    for number in range(200):
        first = {str(block): float(x) for block, x in enumerate(random.normal(0.06, spread, 8))}
        blocks = blocks_to_confirm(first, (), RULES)
        fresh = random.normal(0.06, spread, blocks)
        low, high = estimate_ratio(np.exp(fresh), np.ones(blocks), number, 400).interval()
        narrow += math.log(high / low) / 2 <= PRECISION * math.log1p(RULES.margin) * 1.1
    assert narrow >= 170
