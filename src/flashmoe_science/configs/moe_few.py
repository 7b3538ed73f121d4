"""Tiles of the way through a mixture of experts for few tokens, per architecture and size: data.

Two ways. *Fused*: two kernels; the second one combines, so that there is no buffer of its results. Its blocks read
the intermediate rows of all slots for 16 columns each, which pays while an expert has few of them. *Grouped*: both
products by slots, then a combination; each row of tokens is copied once for many rows of weights. Chosen by measurement on an H200
(docs/kernels/moe-few.md), other architectures by analogy: what counts is how much is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_EXPERTS = 512
MAX_SLOTS = 4096
DIRECT_SLOTS = 32
_SLOT_BYTES = 512
_GROUP_BYTES = 8
_SORTED_BYTES = 2
_TOTALS_BYTES = 128


@dataclass(frozen=True)
class FewTile:
    """What a warp works on. See `kernels/cuda/moe/few_parameters.cuh`."""

    m_tiles: int
    """Tiles of 16 weight rows."""
    n_tiles: int
    """Columns of 8 tokens."""
    k_steps: int
    """Of 32 elements, in a stage."""
    stages: int
    warps: int = 8

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def columns(self) -> int:
        return 8 * self.n_tiles

    @property
    def weight_bytes(self) -> int:
        """Of a warp and stage."""
        return 2 * self.m_tiles * self.k_steps * _SLOT_BYTES

    @property
    def token_bytes(self) -> int:
        """Of a stage."""
        return self.n_tiles * self.k_steps * _SLOT_BYTES

    @property
    def label(self) -> str:
        return f"{self.warps} warps of {16 * self.m_tiles}x{self.columns}x{32 * self.k_steps}, {self.stages} stages"


@dataclass(frozen=True)
class FewConfiguration:
    """Both products."""

    up: FewTile
    down: FewTile
    max_slots: int
    """tokens * top_k may be as many."""
    grouped: bool
    direct: bool = False
    """Every slot for itself, without sorting: at most `DIRECT_SLOTS`."""
    parts: int = 1
    """Warps that share an expert in the fused second product."""

    @property
    def label(self) -> str:
        way = "grouped" if self.grouped else f"fused, {self.parts} parts"
        return f"{way}{', direct' if self.direct else ''}; up {self.up.label}; down {self.down.label}"

    def up_bytes(self) -> int:
        """Shared memory of a block of the first product."""
        if self.grouped:
            return self._grouped_bytes(self.up)
        tile = self.up
        ring = tile.warps * tile.stages * (tile.weight_bytes + tile.token_bytes)
        partial = 2 * tile.warps * tile.m_tiles * tile.n_tiles * _SLOT_BYTES
        return ring + partial + self._routing_bytes(tile)

    def down_bytes(self) -> int:
        """Shared memory of a block of the second product."""
        if self.grouped:
            return self._grouped_bytes(self.down)
        tile = self.down
        ring = tile.warps * tile.stages * (tile.weight_bytes + tile.token_bytes)
        results = self.parts * self.max_slots * 16 * tile.m_tiles * 4
        return ring + results + self._routing_bytes(tile)

    def _grouped_bytes(self, tile: FewTile) -> int:
        stage = tile.warps * tile.weight_bytes + tile.token_bytes
        return tile.stages * stage + self._routing_bytes(tile)

    def _routing_bytes(self, tile: FewTile) -> int:
        if self.direct:
            return 0
        groups = min(self.max_slots, MAX_EXPERTS + self.max_slots // tile.columns)
        return groups * _GROUP_BYTES + self.max_slots * _SORTED_BYTES + _TOTALS_BYTES
