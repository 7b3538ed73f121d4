"""Tiles of the portable kernels of the backward pass (`kernels/cuda/moe_backward_portable*.cu`): data.

By analogy with the forward pass (`configs.moe.portable`): other tiles have not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass

_ELEMENT_BYTES = 2
PART_COLUMNS = 16
"""Columns whose part of the routing weights' gradient is added up in the first product."""


@dataclass(frozen=True)
class BackwardTile:
    """One tile shape. See the kernels for what the fields do there."""

    block_m: int
    """Rows of an expert; of the gradients of weights, rows of the weight."""
    block_n: int
    """Columns, a multiple of 128."""
    block_k: int
    stages: int
    warps_m: int
    warps_n: int
    blocks: int = 1
    """Per multiprocessor."""

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.block_m + self.block_n) * self.block_k * _ELEMENT_BYTES

    @property
    def label(self) -> str:
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k}, {self.stages} stages, "
            f"{self.warps_m}x{self.warps_n} warps, {self.blocks} blocks"
        )


@dataclass(frozen=True)
class MoePortableBackward:
    """The tiles of all products."""

    first: BackwardTile
    """Of the gradient of what the activation is applied to."""
    second: BackwardTile
    """Of the gradient of the input."""
    weights: BackwardTile
    """Of the gradients of the weights."""

    @property
    def label(self) -> str:
        return f"first {self.first.label}; second {self.second.label}; weights {self.weights.label}"


TUNABLE = {
    f"{product}.{name}": 1
    for product in ("first", "second", "weights")
    for name in ("block_m", "block_n", "block_k", "stages", "warps_m", "warps_n", "blocks")
}
"""See `cuda.choice.Tuned.tunable`."""

_DEEP = BackwardTile(128, 128, 32, 4, 4, 2)
_163_KB = MoePortableBackward(_DEEP, _DEEP, _DEEP)
_SHALLOW = BackwardTile(128, 128, 32, 3, 4, 2)
_99_KB = MoePortableBackward(_SHALLOW, _SHALLOW, _SHALLOW)
_TILES = {
    "sm_80": _163_KB,
    "sm_86": _99_KB,
    "sm_87": _163_KB,
    "sm_89": _99_KB,
    "sm_90": _163_KB,
    "sm_100": _163_KB,
    "sm_103": _163_KB,
    "sm_120": _99_KB,
    "sm_121": _99_KB,
}


def tuned_architectures() -> tuple[str, ...]:
    return tuple(_TILES)


def configuration(architecture: str) -> MoePortableBackward:
    """The tiles for a problem. KeyError for an architecture that is not in the table."""
    return _TILES[architecture]


def all_configurations(architecture: str) -> tuple[MoePortableBackward, ...]:
    """Everything that `configuration` can return on an architecture; nothing for one that is not in the table."""
    return (_TILES[architecture],) if architecture in _TILES else ()
