"""Tiles of the Hopper kernel for sequences of any lengths, per head dimension: data.

They are those of the dense Hopper kernel (`configs.attention.hopper`), whose main loop it has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashmoe_science.configs.attention.hopper import (
    CAUSAL_WIDE_FROM,
    NARROW_COST,
    SWIZZLE_PANEL,
    WIDE,
    Shape,
    section_bytes,
)

_BARRIER_BYTES = 16
_TILE_SLOTS = 4
"""Tiles of work between the warp that looks for them and the consumers."""
_FEWEST_ROWS = 8
"""Of a box, which has a multiple of them: by boxes of one row the kernel took 5.9 times as long as the dense one."""
_MIB = 1 << 20


@dataclass(frozen=True)
class HopperFeatures:
    """What a kernel is compiled for. What it is not compiled for costs nothing."""

    causal: bool
    """A row sees a limited number of keys after its position."""
    left_window: bool = False
    softcap: bool = False
    page_rows: int = 0
    """Rows of a box of keys, which lies in one page; 1: no box, rows are copied one by one; 0: keys are packed."""
    chunk: bool = False
    """Rows see keys of their own chunk alone: with `causal` and `left_window`."""
    tree: bool = False
    """Rows have a bit for each of the keys of their sequence's own queries: without `left_window`."""
    only: int = 0
    """The `varlen.problem.Only` of its calls."""


@dataclass(frozen=True)
class HopperVarlenConfiguration:
    """One tile shape. See `kernels/cuda/attention_hopper_varlen.cu` for what the fields do there."""

    head_dim: int
    """Compiled dimension of query and key; a tensor's is padded, in shared memory, to it."""
    value_dim: int
    """Likewise of value and output."""
    consumers: int
    """Warpgroups that compute, 64 query rows each."""
    block_n: int
    """Keys per step."""
    key_stages: int
    value_stages: int
    query_stages: int
    ping_pong: bool
    """Whether the consumers take turns on the tensor cores."""
    features: HopperFeatures
    section_mib: int = 0
    """Keys and values of short sequences that are worked on together; 0: all, dear tiles first."""

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def shared_bytes(self) -> int:
        """Tiles, barriers, and what rounding the start up to 1024 bytes may take."""
        key_row, value_row = (-(-dim // SWIZZLE_PANEL) * 128 for dim in (self.head_dim, self.value_dim))
        key_rows = self.query_stages * self.block_m + self.key_stages * self.block_n
        value_rows = self.value_stages * self.block_n
        barriers = self.query_stages * self.consumers + self.key_stages + self.value_stages + _TILE_SLOTS + 2
        tiles = _TILE_SLOTS * 32
        return key_rows * key_row + value_rows * value_row + barriers * _BARRIER_BYTES + tiles + 1024


_SHAPES: dict[tuple[int, int], Shape] = {
    (64, 64): Shape(consumers=2, block_n=128, key_stages=4, value_stages=3, query_stages=2),
    (96, 96): Shape(consumers=2, block_n=128, key_stages=3, value_stages=2, query_stages=2),
    (128, 128): Shape(consumers=2, block_n=128, key_stages=3, value_stages=2, query_stages=2),
    (192, 128): Shape(consumers=2, block_n=128, key_stages=2, value_stages=2, query_stages=1),
    (192, 192): Shape(consumers=2, block_n=96, key_stages=2, value_stages=2, query_stages=1),
    (256, 256): Shape(consumers=2, block_n=64, key_stages=3, value_stages=2, query_stages=1),
}
DIMENSIONS = tuple(_SHAPES)
"""Compiled (head_dim, value_dim)."""


def compiled_dimensions(head_dim: int, value_dim: int) -> tuple[int, int] | None:
    """The smallest compiled dimensions that hold these; None if there are none."""
    return next((pair for pair in DIMENSIONS if pair[0] >= head_dim and pair[1] >= value_dim), None)


def page_rows(page_size: int, head_dim: int, value_dim: int) -> int:
    """The most rows of a page that one box can have in every block, a multiple of 8; 1 where there is no such number, 0
    where keys are packed (a page size of 0)."""
    if not page_size:
        return 0
    rows = math.gcd(page_size, _shape(head_dim, value_dim).block_n)
    return rows if rows % _FEWEST_ROWS == 0 else 1


@dataclass(frozen=True)
class Extent:
    """What the host knows of how much work there is."""

    rows: int
    """Query rows of a slice: tokens, times the heads of a slice."""
    slices: int
    """Heads, or key heads whose query heads share a tile."""
    max_seqlen_k: int
    multiprocessors: int

    def waves(self, consumers: int) -> int:
        return -(-self.slices * -(-self.rows // (64 * consumers)) // self.multiprocessors)


def configuration(
    head_dim: int, value_dim: int, features: HopperFeatures, extent: Extent
) -> HopperVarlenConfiguration:
    """The tile for a call."""
    compiled = compiled_dimensions(head_dim, value_dim)
    assert compiled is not None
    shape = _SHAPES[compiled]
    if compiled == (64, 64) and _wide(features, extent):
        shape = WIDE
    return HopperVarlenConfiguration(
        head_dim=compiled[0],
        value_dim=compiled[1],
        **vars(shape),
        features=features,
        section_mib=_section_mib(compiled[0], features),
    )


def _section_mib(head_dim: int, features: HopperFeatures) -> int:
    """As the dense kernel has it for short sequences. Without a causal mask tiles of a slice come together anyhow, and
    a window leaves few blocks to each."""
    return section_bytes(head_dim, 0) // _MIB if features.causal and not features.left_window else 0


def _wide(features: HopperFeatures, extent: Extent) -> bool:
    """As `configs.attention.hopper.configuration` has it. The registers of a wide tile hold no cap's arithmetic, those
    of its producers no tree's and no addresses of rows, and a window's keys are few for it."""
    if features.softcap or features.left_window or features.tree or features.page_rows == 1:
        return False
    if features.causal:
        return extent.max_seqlen_k >= CAUSAL_WIDE_FROM
    return extent.waves(WIDE.consumers) <= NARROW_COST * extent.waves(2)


def _shape(head_dim: int, value_dim: int) -> Shape:
    compiled = compiled_dimensions(head_dim, value_dim)
    assert compiled is not None
    return _SHAPES[compiled]
