"""Ceilings of a gain, as shares of the time (0 to 1): the closed forms that a rule can name."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def _part(share: float) -> float:
    """The share itself: all that the part takes goes away."""
    return share


def _rest(share: float) -> float:
    """What is left beside a share that stays."""
    return 1 - share


def _product(share: float, of: float) -> float:
    """A share of a share: the part of a unit's work that is needless, times how long the unit is busy."""
    return share * of


def _shortfall(reached: float, ceiling: float) -> float:
    """Time falls as the rate rises from what is reached to the ceiling."""
    return 1 - reached / ceiling if ceiling > 0 else 0.0


def _excess(needed: float, done: float, busy: float) -> float:
    """Work beyond what is needed goes away, while the unit that does it is busy."""
    return (1 - needed / done) * busy if done > 0 else 0.0


def _least(first: float, second: float) -> float:
    """Two bounds hold at once."""
    return min(first, second)


FORMULAS: Mapping[str, tuple[int, Callable[..., float]]] = {
    "part": (1, _part),
    "rest": (1, _rest),
    "product": (2, _product),
    "shortfall": (2, _shortfall),
    "excess": (3, _excess),
    "least": (2, _least),
}
"""By name: number of operands, function."""


def evaluate(name: str, operands: list[float]) -> float:
    """The named formula, kept between 0 and 1."""
    return min(1.0, max(0.0, FORMULAS[name][1](*operands)))
