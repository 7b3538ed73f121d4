"""How many of many claims are looked at, and what that many tell of the rest."""

from __future__ import annotations

from math import ceil, comb

UNTRUE_SHARE = 1 / 3
"""Of the claims: if at least so many were untrue, one of them is to be met."""

POWER = 0.95
"""With this probability."""


def chance_to_meet(claims: int, sampled: int) -> float:
    """That at least one untrue claim is among ``sampled`` that are drawn from ``claims`` without replacement, where
    ``UNTRUE_SHARE`` of them are untrue (hypergeometric)."""
    untrue = ceil(UNTRUE_SHARE * claims)
    return 1.0 - comb(claims - untrue, sampled) / comb(claims, sampled)


def sample_size(claims: int) -> int:
    """The fewest whose ``chance_to_meet`` reaches ``POWER``; 7 of 24, 8 of any number."""
    return next((size for size in range(1, claims) if chance_to_meet(claims, size) >= POWER), claims)
