"""How many of many claims are looked at, and what that many tell of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, comb, log
from random import Random

UNTRUE_SHARE = 1 / 3
"""Of what is gained: if at least so much were untrue, some of it is to be met."""

POWER = 0.95
"""With this probability."""

_LEAST_GAIN = 1e-3
"""Of a claim that says that nothing was gained: it may be drawn too."""


def chance_to_meet(claims: int, sampled: int) -> float:
    """That one of ``sampled`` claims is untrue at least, which are drawn from ``claims`` by what they gain, where
    ``UNTRUE_SHARE`` of all gain is untrue.

    Each that is drawn and true leaves a larger share of untrue gain, so it is this much or more.
    """
    return 1.0 if sampled >= claims else 1.0 - (1.0 - UNTRUE_SHARE) ** sampled


def chance_to_meet_by_number(claims: int, sampled: int) -> float:
    """The same of claims that are all as likely to be drawn, where ``UNTRUE_SHARE`` of their number is untrue
    (hypergeometric): of runs from before they were drawn by what they gain."""
    untrue = ceil(UNTRUE_SHARE * claims)
    return 1.0 - comb(claims - untrue, sampled) / comb(claims, sampled)


def sample_size(claims: int) -> int:
    """The fewest whose ``chance_to_meet`` reaches ``POWER``: 8, or all where there are fewer."""
    return next((size for size in range(1, claims) if chance_to_meet(claims, size) >= POWER), claims)


def highest_first(speedups: Sequence[float], chance: Random) -> list[int]:
    """Numbers of claims: the one with the highest speed-up, and the others as they are drawn by what they gain.

    Who makes few cases look better than they are has to make them the best to gain much, and the best is looked at."""
    if not speedups:
        return []
    highest = max(range(len(speedups)), key=lambda number: speedups[number])
    return [highest, *(number for number in drawn_by_gain(speedups, chance) if number != highest)]


def drawn_by_gain(speedups: Sequence[float], chance: Random) -> list[int]:
    """Numbers of claims in the order in which they are drawn, each with a chance in proportion to the logarithm of its
    speed-up, which is its part of the geometric mean: one case that makes most of a headline is hardly ever left out.

    Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006: the greatest of u ** (1 / weight) first.
    """
    weights = [max(log(speedup), _LEAST_GAIN) if speedup > 0.0 else _LEAST_GAIN for speedup in speedups]
    keys = [log(1.0 - chance.random()) / weight for weight in weights]
    return sorted(range(len(keys)), key=lambda number: -keys[number])
