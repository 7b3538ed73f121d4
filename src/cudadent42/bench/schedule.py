"""The order of calls: randomised paired blocks.

Timing all of A and then all of B turns any drift of the machine into a difference between them. Here every
block holds each implementation once; a random order is followed by its mirror image (A B C, C B A), so a
linear drift cancels within each pair of blocks. (Randomised interleaved trials: Abedi and Brecht, ICPE
2017.)
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from cudadent42.seeds import derived_seed

CONTROL_SUFFIX = "_control"


def control_name(baseline: str) -> str:
    """Name of the rows in which the baseline runs once more, against itself (A/A)."""
    return baseline + CONTROL_SUFFIX


def block_orders(names: Sequence[str], blocks: int, seed: int, case: str) -> list[tuple[str, ...]]:
    """For each block, every name once, in an order that depends on ``seed`` and ``case`` alone."""
    shuffler = random.Random(derived_seed(seed, "schedule", case))
    orders: list[tuple[str, ...]] = []
    while len(orders) < blocks:
        order = list(names)
        shuffler.shuffle(order)
        orders += [tuple(order), tuple(reversed(order))]
    return orders[:blocks]
