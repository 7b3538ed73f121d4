"""The order of calls: randomised paired blocks.

Timing all of A and then all of B turns any drift of the machine into a difference between them. Here every block
holds each implementation once. A random order is followed by its mirror image (A B C, C B A), so a linear drift
cancels within each pair of blocks. (Randomised interleaved trials: Abedi and Brecht, ICPE 2017.)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from cudadent42.base.seeds import derived_seed

T = TypeVar("T")

CONTROL_SUFFIX = "_control"


ROUND_BLOCKS = 6
"""Blocks of a case before the next case has its turn: even, so that a block and its mirror image stay
together."""


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


def alternating(order: Sequence[T], passes: int) -> list[list[T]]:
    """The passes of one block: the order, its mirror image, and so on."""
    return [list(order) if number % 2 == 0 else list(reversed(order)) for number in range(passes)]


def rounds(blocks: int) -> list[range]:
    """The blocks of each visit to a case: ``ROUND_BLOCKS``, and more at the last one."""
    starts = [ROUND_BLOCKS * number for number in range(max(1, blocks // ROUND_BLOCKS))]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], blocks], strict=True)]
