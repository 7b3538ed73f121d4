"""How many blocks a fresh race of a winner has, from what its own race showed: a pure function.

The size is that of a second sample from the spread of a first (Stein, 1945): Student's t, as the spread is known from
few blocks. All arms of the race are as noisy, so the spread is the median of theirs: a spike in one row says nothing of
the confirmation, whose centre leaves spikes out. Only the second sample is judged, so its interval holds its level
whatever the first one showed. A winner's own ratio is too good, but it only sets a size here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

from cudadent42.decisions.margin import upper
from cudadent42.decisions.racing import Row, Rules, centre_of
from cudadent42.decisions.statistics import CENTRE_FACTOR, INTERVAL_FACTOR
from cudadent42.decisions.student import quantile

LEAST = 24
"""Blocks, as for any interval of this lab whose width is to be believed."""

MOST = 108

PRECISION = 0.25
"""Half-width of the interval that is wanted, as a share of the margin."""

_TAIL = 0.025
_SURE = 2.33
"""Standard errors from a winner's ratio to the margin with which 99 of 100 intervals lie above it, beyond the
interval's own half."""


def blocks_to_confirm(row: Row, others: Iterable[Row], rules: Rules) -> int:
    """An even number, as blocks come in pairs of an order and its mirror image.

    ``row``: the winner's of its race; ``others``: those of all other arms but the default. The interval is to be ±
    ``PRECISION`` of the margin; where the winner lies nearer to the margin, as narrow as it takes to be told from it.
    Too few blocks to know a spread ask for ``MOST``.
    """
    winner = centre_of(row)
    if winner is None:
        return MOST
    measured = [(len(other), centre_of(other)) for other in others] + [(len(row), winner)]
    spreads = [(blocks * each[1], each[2]) for blocks, each in measured if each is not None]
    degrees = sum(each for _, each in spreads)
    variance = median(own / _median_of_variances(each) for own, each in spreads)
    spread = CENTRE_FACTOR * math.sqrt(variance)
    wanted = PRECISION * math.log(upper(rules.margin))
    beyond = winner[0] - math.log(upper(rules.margin))
    if beyond > 0.0:  # else it is told from the margin by luck alone
        wanted = min(wanted, beyond * INTERVAL_FACTOR / (INTERVAL_FACTOR + _SURE))
    if wanted <= 0.0:
        return MOST
    needed = (quantile(_TAIL, degrees) * spread / wanted) ** 2
    return min(MOST, max(LEAST, 2 * math.ceil(min(needed, MOST) / 2.0)))


def _median_of_variances(degrees: float) -> float:
    """Of samples of normal noise, over the true one: the median of chi-square by its degrees of freedom (Wilson and
    Hilferty, 1931)."""
    return (1.0 - 2.0 / (9.0 * degrees)) ** 3
