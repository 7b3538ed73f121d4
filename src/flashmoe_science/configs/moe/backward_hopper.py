"""Tiles of the Hopper kernels of the backward pass (`kernels/cuda/moe_backward_*.cu`): data.

docs/kernels/moe-backward.md has every variant with its figures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashmoe_science.configs.moe.hopper import PAIRS_FROM, MoeHopperConfiguration

PANEL = 64
"""Columns, and inner rows, of a box: 128 bytes, what TMA swizzles by."""
PARTS_PER_TILE = 16
"""Partial sums of the routing weights' gradients that a tile of columns leaves: one for 16 columns."""
BOX_ROWS = 32
"""Of the first product's results, which leave in boxes of a panel's columns."""
_BOXES_BYTES = 2 * 2 * BOX_ROWS * PANEL * 2
"""Where activated rows wait until they have left: two boxes for each of two consumers."""


@dataclass(frozen=True)
class MoeHopperBackward:
    """The tiles of all products. Pairs of blocks are for the second alone."""

    first: MoeHopperConfiguration
    """Of the gradient of what the activation is applied to: leaves registers for what is made of it. Its `step` and
    `tokens` are multiples of 32, its step at most 64."""
    second: MoeHopperConfiguration
    """Of the gradient of the input."""
    weights: MoeHopperConfiguration
    """Of the gradients of the weights; `tokens` are columns of the sorted rows, in panels of 64."""

    @property
    def first_shared_bytes(self) -> int:
        """Of the first product: boxes begin at a multiple of 1024 bytes, behind all else."""
        return -(-self.first.shared_bytes // 1024) * 1024 + _BOXES_BYTES


TUNABLE = {
    f"{product}.{name}": 1
    for product, names in (
        ("first", ("tokens", "step", "stages")),
        ("second", ("tokens", "step", "stages")),
        ("weights", ("tokens", "stages")),
    )
    for name in names
}
"""See `cuda.choice.Tuned.tunable`."""

WIDE = MoeHopperBackward(
    first=MoeHopperConfiguration(tokens=160, step=32, stages=4),
    second=MoeHopperConfiguration(tokens=192, step=16, stages=4),
    weights=MoeHopperConfiguration(tokens=192, step=16, stages=4),
)


PAIRS = replace(WIDE, second=replace(WIDE.second, cluster=2))
_PAIRS_UP_TO = 4096
"""Intermediate size: pairs won at 768 and 2,880, and lost at 14,336."""


def configuration(rows_per_expert: float, intermediate: int, *, gated: bool) -> MoeHopperBackward:
    """The tiles for so many rows of an expert in the mean."""
    if gated and rows_per_expert >= PAIRS_FROM and intermediate <= _PAIRS_UP_TO:
        return PAIRS
    return WIDE
