"""Shapes of the Hopper kernel for decode steps (`kernels/cuda/attention_decode_hopper.cu`): data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

TILE_KEYS = 64
"""Keys that a warpgroup multiplies at a time."""
WARPGROUPS = 2
"""That compute; warps of a third one load."""
WARPS = 4 * WARPGROUPS
DIMENSIONS = (64, 128)
PRODUCT_ROWS = 64
"""Query rows that wgmma multiplies at a time, whatever their number."""
_ROW_TILES = (1, 2, 4, 8)
_IN_FLIGHT = 128 << 10
"""Bytes of keys and values that a block asks for ahead: with 192 KB one token took 1.00 to 1.04 of the time."""
MOST_QUADS = 4 * _ROW_TILES[-1] * (DIMENSIONS[-1] // 64)
"""That any configuration has: see `DecodeHopperConfiguration.quads`."""
_LEAST_BOX_ROWS = 8
"""Of fewer, a warp has no time for all boxes of a tile: 70 cycles each."""
_MOST_ROWS_OF_PARTS = 32
"""With more, shared memory has no room for what blocks of a cluster send each other."""
_MOST_ROWS_OF_ONE = 16
_FEWEST_TOGETHER = 8
_MOST_TOGETHER = 32
"""Blocks of a set: with more, results meet in groups."""
_ALIGNMENT = 1024
_SLOTS = 4
_BARRIERS = 16
"""Bytes of a pair."""


@dataclass(frozen=True)
class DecodeHopperConfiguration:
    """One kernel. See `kernels/cuda/attention_decode_hopper.cu` for what the fields do there."""

    head_dim: int
    value_dim: int
    row_tiles: int
    """Query rows of a set / 8."""
    stages: int
    """Tiles of keys that there is room for, and as many of values: the same number for each warpgroup."""
    box_rows: int
    """Rows of a box of keys, which lies in one page; 1: each key is looked up, and threads copy its row."""
    paged: bool
    softcap: bool = False
    chunk: bool = False
    parts: int = 1
    """Blocks of a cluster that go through the same segments, each through a part of the keys."""
    tile_keys: int = TILE_KEYS
    together: bool = False
    """Whether blocks that share a set of rows wait for each other and each finish a part of it."""
    only: int = 0
    """The `varlen.problem.Only` of its calls."""

    @property
    def gathered(self) -> bool:
        """Whether keys come without TMA, whose boxes would have too few rows."""
        return self.paged and self.box_rows == 1

    @property
    def threads(self) -> int:
        return 32 * WARPS + 128

    @property
    def rows(self) -> int:
        return 8 * self.row_tiles

    @property
    def warps(self) -> int:
        """That leave each other results."""
        return WARPS

    @property
    def quads(self) -> int:
        """Groups of 4 values in each of 32 lanes that the output of one set of rows has."""
        return 4 * self.row_tiles * (self.value_dim // 64)

    @property
    def shared_bytes(self) -> int:
        stage = 2 * self.tile_keys * (self.head_dim + self.value_dim) + 2 * _BARRIERS
        queries = 2 * PRODUCT_ROWS * self.head_dim
        results = WARPGROUPS * self.quads * 32 * 16
        gathered = self.quads * 32 * 16 + 8 * self.parts * self.rows if self.parts > 1 else 0
        return self.stages * stage + queries + results + gathered + (_SLOTS + 1) * _BARRIERS + _ALIGNMENT


def box_rows(page_size: int) -> int:
    """The most rows of a page that one box can have in every tile; 1 where that is too few for TMA."""
    rows = math.gcd(page_size, TILE_KEYS) if page_size else TILE_KEYS
    return rows if rows >= _LEAST_BOX_ROWS else 1


def parts_for(sets: int, rows: int, multiprocessors: int) -> int:
    """Blocks of a cluster: two where there are so many for each set, and not twice as many.

    Args:
        sets: of rows with keys that they share, in the call.
        rows: packed, of a sequence.
    """
    two_each = 2 * sets <= multiprocessors < 4 * sets
    return 2 if two_each and rows <= _MOST_ROWS_OF_PARTS else 1


def finish_together(sets: int, rows: int, multiprocessors: int) -> bool:
    """Whether blocks that share a set finish it together: where the last one would read many results of many rows.

    Args:
        sets, rows: as of `parts_for`.
    """
    blocks_are_many = _FEWEST_TOGETHER * sets <= multiprocessors <= _MOST_TOGETHER * sets
    return rows > _MOST_ROWS_OF_ONE and blocks_are_many


def configuration(
    head_dim: int,
    value_dim: int,
    rows: int,
    page_size: int,
    *,
    softcap: bool = False,
    chunk: bool = False,
    parts: int = 1,
    together: bool = False,
) -> DecodeHopperConfiguration:
    """The kernel for so many packed rows (query tokens x heads that share keys); ``parts`` as `parts_for` has it,
    ``together`` as `finish_together` does.
    """
    row_tiles = next((tiles for tiles in _ROW_TILES if 8 * tiles >= rows), _ROW_TILES[-1])
    least = DecodeHopperConfiguration(
        head_dim, value_dim, row_tiles, 1, box_rows(page_size), page_size > 0, softcap, chunk, parts
    )
    if together and not least.gathered:  # threads that copy rows leave too few registers
        least = replace(least, together=True)
    stages = _IN_FLIGHT // (2 * TILE_KEYS * (head_dim + value_dim))
    return replace(least, stages=stages // WARPGROUPS * WARPGROUPS)
