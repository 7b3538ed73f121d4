"""Tiles of the portable kernels of the backward pass (`kernels/cuda/moe_backward_portable*.cu`): data.

By analogy with the forward pass (`configs.moe.portable`): other tiles have not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from flashmoe_science.configs.moe.portable import Tile

PART_COLUMNS = 16
"""Columns whose part of the routing weights' gradient is added up in the first product."""


@dataclass(frozen=True)
class BackwardTile(Tile):
    """Of the backward pass."""

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes


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
    f"{product}.{field.name}": 1 for product in ("first", "second", "weights") for field in fields(Tile)
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
