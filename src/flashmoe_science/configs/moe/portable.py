"""Tiles of the portable grouped products (`kernels/cuda/moe_portable.cu`), per architecture: data.

A warp has 64 rows and 64 rows of weights where registers allow it: 128 accumulators, and fragments of two slices. Tiles
with fewer rows are for experts that get few: a tile's cost hardly depends on how many are used. Those of sm_90 were
measured (docs/kernels/moe-portable.md); the others follow from registers and shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

_ELEMENT_BYTES = 2
_WORK_TILE_BYTES = 16
_QUEUE_BYTES = 8  # where the search for work goes on


@dataclass(frozen=True)
class Tile:
    """One tile shape of a grouped product by mma.sync. `moe_portable.cu` says what fields do."""

    block_m: int
    """Rows of an expert; of the gradients of weights, rows of the weight."""
    block_n: int
    """Rows of weights per tile, with a gate half as many output columns; of gradients columns, a multiple of 128."""
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
    def stage_bytes(self) -> int:
        return (self.block_m + self.block_n) * self.block_k * _ELEMENT_BYTES

    @property
    def label(self) -> str:
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k}, {self.stages} stages, "
            f"{self.warps_m}x{self.warps_n} warps, {self.blocks} blocks"
        )


@dataclass(frozen=True)
class ProductTile(Tile):
    """Of the forward pass."""

    def shared_bytes(self, gather: bool) -> int:
        """Stages, then the queue of work (`WorkQueue` of `moe_portable.cu`)."""
        published = (self.stages + 2) * _WORK_TILE_BYTES + 2 * 4 * (self.block_m if gather else 1)
        return self.stages * self.stage_bytes + published + _QUEUE_BYTES


@dataclass(frozen=True)
class PortableMoeConfiguration:
    """The tiles of both products."""

    up: ProductTile
    down: ProductTile

    @property
    def label(self) -> str:
        return f"up {self.up.label}; down {self.down.label}"


TUNABLE = {f"{product}.{field.name}": 1 for product in ("up", "down") for field in fields(Tile)}
"""See `cuda.choice.Tuned.tunable`."""

# The mean number of rows per expert from which on a configuration is taken; the first is from 0.
_ByRows = tuple[tuple[float, PortableMoeConfiguration], ...]


def _both(tile: ProductTile) -> PortableMoeConfiguration:
    return PortableMoeConfiguration(tile, tile)


_SM_90: _ByRows = (
    (0, PortableMoeConfiguration(ProductTile(32, 256, 64, 4, 1, 4), ProductTile(32, 256, 64, 3, 1, 4, 2))),
    (
        24,  # not 64 deep: NVRTC 13.5 spills there with an exact GELU
        PortableMoeConfiguration(ProductTile(64, 256, 32, 5, 1, 4, 2), ProductTile(64, 128, 64, 3, 2, 2, 3)),
    ),
    (192, _both(ProductTile(128, 256, 64, 4, 2, 4))),
)
_SM_80: _ByRows = (
    (0, _both(ProductTile(32, 256, 32, 4, 1, 4, 2))),
    (24, _both(ProductTile(64, 128, 64, 3, 2, 2, 2))),
    (192, _both(ProductTile(128, 256, 64, 3, 2, 4))),
)
# 99 KB, and half the tensor rate per multiprocessor: shorter slices keep up.
_SM_86: _ByRows = (
    (0, _both(ProductTile(32, 256, 32, 4, 1, 4))),
    (24, _both(ProductTile(64, 128, 32, 4, 2, 2, 2))),
    (192, _both(ProductTile(128, 256, 32, 4, 2, 4))),
)
_TILES: dict[str, _ByRows] = {
    "sm_80": _SM_80,
    "sm_86": _SM_86,
    "sm_87": _SM_80,
    "sm_89": _SM_86,
    "sm_90": _SM_90,
    "sm_100": _SM_90,
    "sm_103": _SM_90,
    "sm_120": _SM_86,
    "sm_121": _SM_86,
}


def tuned_architectures() -> tuple[str, ...]:
    return tuple(_TILES)


def configuration(architecture: str, rows_per_expert: float) -> PortableMoeConfiguration:
    """The tiles for experts with so many rows on average. KeyError for an architecture that is not in the table."""
    return [tile for least, tile in _TILES[architecture] if least <= rows_per_expert][-1]


def all_configurations(architecture: str) -> tuple[PortableMoeConfiguration, ...]:
    """Everything that `configuration` can return on an architecture; nothing for one that is not in the table."""
    return tuple(dict.fromkeys(tile for _, tile in _TILES.get(architecture, ())))
