"""Tiles of the Hopper kernels of the backward pass (`kernels/cuda/moe_backward_*.cu`): data.

docs/kernels/moe-backward.md has every variant with its figures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashmoe_science.configs.moe.hopper import MoeHopperConfiguration

PANEL = 64
"""Columns, and inner rows, of a box: 128 bytes, what TMA swizzles by."""
PARTS_PER_TILE = 16
"""Partial sums of the routing weights' gradients that a tile of columns leaves: one for 16 columns."""


@dataclass(frozen=True)
class MoeHopperBackward:
    """The tiles of all products."""

    first: MoeHopperConfiguration
    """Of the gradient of what the activation is applied to: leaves registers for what is made of it."""
    second: MoeHopperConfiguration
    """Of the gradient of the input."""
    weights: MoeHopperConfiguration
    """Of the gradients of the weights; `tokens` are columns of the sorted rows, in panels of 64."""
    through_shared: bool = False
    """The first product's results go through shared memory; its `step` and `tokens` are multiples of 32 then."""
    one_epilogue: bool = False
    """The first product's machine code has what becomes of a panel once, for all panels and consumers."""
    slots_ahead: bool = False
    """Of the gradients of the weights: a stage's slots become tokens once the next ones are on their way."""


TUNABLE = {
    f"{product}.{name}": 1
    for product, names in (
        ("first", ("tokens", "step", "stages")),
        ("second", ("tokens", "step", "stages")),
        ("weights", ("tokens", "stages")),
    )
    for name in names
}
"""What a table of tuned configurations may set, and the least value: nothing that makes results wrong."""

WIDE = MoeHopperBackward(
    first=MoeHopperConfiguration(tokens=160, step=32, stages=4),
    second=MoeHopperConfiguration(tokens=192, step=16, stages=4),
    weights=MoeHopperConfiguration(tokens=192, step=16, stages=4),
    through_shared=True,
    one_epilogue=True,
    slots_ahead=True,
)
FOUR_EPILOGUES = replace(
    WIDE, first=MoeHopperConfiguration(tokens=128, step=32, stages=4), one_epilogue=False
)
"""What was there before, 2 to 4 % slower, with the same bits (docs/kernels/notebooks/moe-backward.md)."""
IN_REGISTERS = replace(WIDE, through_shared=False, one_epilogue=False, slots_ahead=False)
"""What was there first, another 16 % slower at 32,768 tokens."""
TRIMMED = replace(WIDE, first=replace(WIDE.first, trims=True), second=replace(WIDE.second, trims=True))
"""The same bits; at no size faster."""


def configuration() -> MoeHopperBackward:
    """The tiles for a problem."""
    return WIDE


def all_configurations() -> tuple[MoeHopperBackward, ...]:
    """Everything that `configuration` can return."""
    return (WIDE,)
