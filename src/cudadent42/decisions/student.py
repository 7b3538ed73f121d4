"""Student's t distribution, for which NumPy has no quantile: by the regularised incomplete beta function.

The continued fraction is that of Abramowitz and Stegun (1964), 26.5.8, evaluated by Lentz's method (1976).
"""

from __future__ import annotations

import functools
import math

_SMALL = 1e-300
_ENOUGH = 1e-14
_MOST_TERMS = 300
_STEPS = 200


def upper_tail(t: float, degrees: float) -> float:
    """The probability that Student's t of so many degrees of freedom exceeds ``t``."""
    half = 0.5 * _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))
    return half if t >= 0 else 1.0 - half


@functools.lru_cache(maxsize=4096)
def quantile(tail: float, degrees: float) -> float:
    """The value that Student's t exceeds with probability ``tail``, above 0 and at most a half."""
    if not 0.0 < tail <= 0.5 or degrees <= 0:
        raise ValueError(f"expected a tail in (0, 0.5] and some degrees of freedom, got {tail} and {degrees}")
    low, high = 0.0, 1.0
    while upper_tail(high, degrees) > tail:
        low, high = high, 2.0 * high
    value = 0.5 * (low + high)
    for _ in range(_STEPS):
        excess = upper_tail(value, degrees) - tail
        low, high = (value, high) if excess > 0 else (low, value)
        # Newton's step, as long as it stays between bounds that halve where it does not.
        following = value + excess / _density(value, degrees)
        if not low < following < high:
            following = 0.5 * (low + high)
        if abs(following - value) <= _ENOUGH * following or following in (low, high):
            return following
        value = following
    return value


def _density(t: float, degrees: float) -> float:
    half = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    return math.exp(half - (degrees + 1) / 2 * math.log1p(t * t / degrees)) / math.sqrt(degrees * math.pi)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1.0) / (a + b + 2.0):  # where the fraction would converge slowly
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    front = math.exp(
        a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    )
    return front / a / _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    """1 + d1/(1 + d2/(1 + ...))."""
    value = 1.0
    c, d = 1.0, 0.0
    for term in range(1, _MOST_TERMS):
        m = term // 2
        if term % 2:
            coefficient = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            coefficient = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1.0 / (_not_zero(1.0 + coefficient * d))
        c = _not_zero(1.0 + coefficient / c)
        value *= c * d
        if abs(c * d - 1.0) < _ENOUGH:
            break
    return value


def _not_zero(value: float) -> float:
    return value if abs(value) > _SMALL else _SMALL
