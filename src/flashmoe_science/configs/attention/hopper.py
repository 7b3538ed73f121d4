"""Tiles of the Hopper attention kernel, per head dimension: data.

Measured on an H200; docs/kernels/notebooks/hopper.md has every variant, and why. At head dim 64 three consumers hide
each other's softmax, but for causal masks with few keys or tiles. From 96 on registers allow two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flashmoe_science.configs.ablation import Ablation

SWIZZLE_PANEL = 64
"""Columns of a shared-memory panel: 128 bytes, what TMA swizzles by."""


@dataclass(frozen=True)
class HopperConfiguration:
    """One tile shape of `attention_hopper.cu`, which says what fields do."""

    head_dim: int
    """Compiled head dimension; a tensor's is padded, in shared memory, to the next."""
    consumers: int
    """Warpgroups that compute, 64 query rows each."""
    block_n: int
    """Keys per step."""
    key_stages: int
    value_stages: int
    query_stages: int
    ping_pong: bool
    """Whether the consumers take turns on the tensor cores."""
    causal: bool
    ablation: Ablation = Ablation.NONE

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def blocks_per_multiprocessor(self) -> int:
        """With one consumer two share it, and both have to fit."""
        return 2 if self.consumers == 1 else 1

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def shared_bytes(self) -> int:
        """Tiles, barriers, and what rounding the start up to 1024 bytes may take."""
        row_bytes = -(-self.head_dim // SWIZZLE_PANEL) * 128
        rows = self.query_stages * self.block_m + (self.key_stages + self.value_stages) * self.block_n
        barriers = 16 * (self.query_stages * self.consumers + self.key_stages + self.value_stages + 2)
        tiles = 2 * 16
        return rows * row_bytes + barriers + tiles + 1024


TUNABLE = {
    "consumers": 1,
    "block_n": 1,
    "key_stages": 1,
    "value_stages": 1,
    "query_stages": 1,
    "ping_pong": 0,
}
"""See `cuda.choice.Tuned.tunable`."""


@dataclass(frozen=True)
class Shape:
    """Of a tile: these fields of a configuration."""

    consumers: int
    block_n: int
    key_stages: int
    value_stages: int
    query_stages: int
    ping_pong: bool = False


WIDE = Shape(consumers=3, block_n=128, key_stages=4, value_stages=3, query_stages=2, ping_pong=True)
_CAUSAL_WIDE = replace(WIDE, ping_pong=False)
_NARROW = Shape(consumers=2, block_n=128, key_stages=4, value_stages=3, query_stages=2)
_SHORT = Shape(consumers=1, block_n=128, key_stages=2, value_stages=2, query_stages=1)
_SHAPES: dict[int, Shape] = {
    64: WIDE,
    96: Shape(consumers=2, block_n=128, key_stages=3, value_stages=2, query_stages=2),
    128: Shape(consumers=2, block_n=128, key_stages=3, value_stages=2, query_stages=2),
    192: Shape(consumers=2, block_n=96, key_stages=2, value_stages=2, query_stages=1),
    256: Shape(consumers=2, block_n=64, key_stages=3, value_stages=2, query_stages=1),
}
HEAD_DIMS = tuple(_SHAPES)
CAUSAL_WIDE_FROM = 8192
"""Keys from which on the tall tile is better for head dim 64 with a causal mask, however few tiles there are."""
_CAUSAL_WIDE_FILLED_FROM = 2048
_CAUSAL_WIDE_WAVES = 7.0
"""Keys, and narrow tiles a multiprocessor, from which on it is better too: there are enough tiles to even out how much
of each the mask hides (2026-11-24-h200-hopper-64-waves)."""
_CAUSAL_SHORT_WAVES = 2.0
"""Narrow tiles a multiprocessor, up to which short ones are better under a causal mask. A tile that sees all keys takes
twice the average then, and nothing is left to fill the other multiprocessors with."""
NARROW_COST = 0.8
"""Time of a narrow tile over that of a wide one, from calls of one and two waves (20.4 against 24.4 us, 69 against
88)."""

_MIB = 1 << 20
_LONG_HEAD_BYTES = 2 * _MIB
_SECTION_BYTES = {64: 32 * _MIB, 128: 16 * _MIB}
_LONG_SECTION_BYTES = 64 * _MIB


def compiled_head_dim(head_dim: int) -> int:
    """The smallest compiled head dimension that holds this one (at most 256)."""
    return next(size for size in HEAD_DIMS if size >= head_dim)


def configuration(
    head_dim: int, causal: bool, seqlen_q: int, seqlen_k: int, slices: int, multiprocessors: int
) -> HopperConfiguration:
    """The tile for a problem of `slices` (batch x heads) on a GPU of so many multiprocessors."""
    size = compiled_head_dim(head_dim)
    shape = _SHAPES[size]
    if shape is WIDE:
        shape = _shape_of_64(causal, seqlen_q, seqlen_k, slices, multiprocessors)
    return _configuration(size, shape, causal)


def _shape_of_64(causal: bool, seqlen_q: int, seqlen_k: int, slices: int, multiprocessors: int) -> Shape:
    def waves(shape: Shape) -> float:
        return slices * -(-seqlen_q // (64 * shape.consumers)) / multiprocessors

    if causal:
        narrow = waves(_NARROW)
        if narrow <= _CAUSAL_SHORT_WAVES:
            return _SHORT
        filled = seqlen_k >= _CAUSAL_WIDE_FILLED_FROM and narrow >= _CAUSAL_WIDE_WAVES
        return _CAUSAL_WIDE if filled or seqlen_k >= CAUSAL_WIDE_FROM else _NARROW
    return _NARROW if math.ceil(waves(_NARROW)) * NARROW_COST < math.ceil(waves(WIDE)) else WIDE


def all_configurations() -> tuple[HopperConfiguration, ...]:
    """Everything that `configuration` can return."""
    return tuple(
        _configuration(size, shape, causal)
        for causal in (False, True)
        for size, usual in _SHAPES.items()
        for shape in ((_CAUSAL_WIDE if causal else WIDE, _NARROW, _SHORT) if usual is WIDE else (usual,))
    )


def _configuration(size: int, shape: Shape, causal: bool) -> HopperConfiguration:
    return HopperConfiguration(head_dim=size, causal=causal, **vars(shape))


def section_bytes(head_dim: int, kv_head_bytes: int) -> int:
    """How many bytes of keys and values are worked on together under a causal mask.

    Few for short sequences, so that they are read from memory once and from L2 after that. More for long ones, whose
    tiles run down the same keys side by side, and where starting the longest tiles of all heads first counts for
    more.
    """
    if kv_head_bytes >= _LONG_HEAD_BYTES:
        return _LONG_SECTION_BYTES
    return _SECTION_BYTES.get(compiled_head_dim(head_dim), 32 * _MIB)
