"""Tiles of the way through a mixture of experts for few tokens, per architecture and size: data.

Chosen by measurement on an H200 (docs/kernels/moe-few.md), other architectures by analogy: what counts is how much is
in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MAX_EXPERTS = 512
MAX_SLOTS = 4096
DIRECT_SLOTS = 32
_SLOT_BYTES = 512
_GROUP_BYTES = 8
_SORTED_BYTES = 2
_TOTALS_BYTES = 128


class FewWay(Enum):
    """How the warps of a block share the work of one product: the kernels `moe_few_*.cu`."""

    SPLIT = "split"
    """They split the inner dimension of the same rows of weights."""
    TILES = "tiles"
    """Each has rows of its own, and tokens are copied once for all of them."""
    COMBINED = "combined"
    """Each has experts of its own for the same columns of the output; of the second product, with the combination."""


@dataclass(frozen=True)
class FewProduct:
    """One product. See `kernels/cuda/moe/few_parameters.cuh` for what the fields do there."""

    way: FewWay
    m_tiles: int
    """Of 16 weight rows, of a warp at a time."""
    n_tiles: int
    """Of 8 tokens."""
    k_steps: int
    """Of 32 elements, in a stage."""
    stages: int
    warps: int = 8
    parts: int = 1
    """Warps that share an expert in `FewWay.COMBINED`."""

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def columns(self) -> int:
        return 8 * self.n_tiles

    @property
    def unit_tiles(self) -> int:
        """Tiles of an expert that a block works on at a time."""
        return self.m_tiles * (self.warps if self.way is FewWay.TILES else 1)

    @property
    def label(self) -> str:
        parts = f"/{self.parts}" if self.parts > 1 else ""
        size = f"{16 * self.m_tiles}x{self.columns}x{32 * self.k_steps}"
        return f"{self.way.value}{parts} {self.warps} warps x {size} x {self.stages}"

    def shared_bytes(self, max_slots: int, *, direct: bool) -> int:
        """Of a block: ring, what its warps exchange, and routing."""
        weights = self.warps * 2 * self.m_tiles * self.k_steps * _SLOT_BYTES
        tokens = self.n_tiles * self.k_steps * _SLOT_BYTES
        exchanged = 0
        if self.way is not FewWay.TILES:
            tokens *= self.warps
        if self.way is FewWay.SPLIT:
            exchanged = 2 * self.warps * self._tiles_together() * self.n_tiles * _SLOT_BYTES
        elif self.way is FewWay.COMBINED:
            exchanged = self.parts * max_slots * 16 * self.m_tiles * 4
        routing = 0
        if not direct:
            groups = min(max_slots, MAX_EXPERTS + max_slots // self.columns)
            routing = groups * _GROUP_BYTES + max_slots * _SORTED_BYTES + _TOTALS_BYTES
        return self.stages * (weights + tokens) + exchanged + routing

    def _tiles_together(self) -> int:
        """Tiles whose partial sums are exchanged at a time in `FewWay.SPLIT`."""
        most = max(1, min(4 // self.n_tiles, self.m_tiles))
        return next(tiles for tiles in range(most, 0, -1) if self.m_tiles % tiles == 0)


@dataclass(frozen=True)
class FewConfiguration:
    """Both products."""

    up: FewProduct
    down: FewProduct
    max_slots: int
    """tokens * top_k may be as many."""
    direct: bool = False
    """Every slot for itself, without sorting: at most `DIRECT_SLOTS`."""

    @property
    def combined(self) -> bool:
        """The second product combines; otherwise a kernel of its own does."""
        return self.down.way is FewWay.COMBINED

    @property
    def label(self) -> str:
        slots = "direct" if self.direct else f"{self.max_slots} slots"
        return f"{slots}; {self.up.label}; {self.down.label}"

    def shared_bytes(self, product: FewProduct) -> int:
        return product.shared_bytes(self.max_slots, direct=self.direct)
