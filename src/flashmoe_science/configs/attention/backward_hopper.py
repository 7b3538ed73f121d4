"""Tiles of the Hopper kernel of attention backward: data."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIMS = (64, 128)
"""Head dimensions that are compiled; TMA pads a tensor's to the next of these."""
BLOCK_N = 128
"""Keys per block: 64 for each of two consumer warpgroups."""
PIECES = 2
PIECE_FLOATS = 64 * 64
"""Of dQ; each consumer computes one piece of a block of query rows."""
PREPARE_THREADS = 256
PREPARE_DEPTH = 2
"""Rows that a thread has on the way where statistics are prepared."""
CONVERT_THREADS = 256
SWIZZLE_PANEL = 64
"""Columns of a shared-memory panel with the 128-byte swizzle."""
_STAGES = 2
_BARRIER_BYTES = 32 + 3 * _STAGES * 16 + _STAGES * 8 + _STAGES * 32 + 2 * 8 + 16
"""Of keys; of queries, their gradients and pieces; of scores; of tiles, with their slots; of sums, with their tile."""
_STAGGERED_KEYS = 1024
"""With head dimensions above 64 and no mask; elsewhere staggered tiles were slower."""
_SECTION_BYTES = 32 << 20
_SECTION_HEADS = (16, 64)
"""Least and most. With few, blocks wait for each other: a tile adds its part of dQ after the tile with the keys before,
and the way there and back is longer than a step. With many, the sums of dQ, which are read and written at every step,
fall out of L2. Measured on an H200 (docs/kernels/backward-hopper.md)."""


@dataclass(frozen=True)
class HopperBackward:
    """See `kernels/cuda/attention_backward_hopper.cu`."""

    head_dim: int
    """Compiled head dimension."""
    causal: bool
    converts: bool = False
    """A warp makes dQ of its sums, in place of a kernel behind. With a mask alone."""
    staggered: bool = False
    """Tiles of a head side by side, at no time two at the same query rows. Without a mask alone."""

    @property
    def block_m(self) -> int:
        """Query rows per step."""
        return PIECES * PIECE_FLOATS // self.head_dim

    @property
    def threads(self) -> int:
        return 3 * 128

    @property
    def lanes(self) -> int:
        """That share a row where statistics are prepared, eight elements each."""
        return self.head_dim // 8

    @property
    def shared_bytes(self) -> int:
        row_bytes = 2 * self.head_dim
        keys = 2 * BLOCK_N * row_bytes
        rings = 2 * _STAGES * self.block_m * row_bytes
        scores = _STAGES * (self.block_m // SWIZZLE_PANEL) * BLOCK_N * 2 * SWIZZLE_PANEL
        pieces = (1 + self.converts) * PIECES * PIECE_FLOATS * 4
        statistics = 2 * _STAGES * self.block_m * 4 + self.converts * SWIZZLE_PANEL * 4
        return keys + rings + scores + pieces + statistics + _BARRIER_BYTES


def configuration(
    head_dim: int, causal: bool, *, seqlen_k: int = _STAGGERED_KEYS + 1, query: bool = True
) -> HopperBackward | None:
    """None if the head dimension is larger than those that are compiled. ``query``: its gradient is asked for."""
    compiled = next((size for size in HEAD_DIMS if size >= head_dim), None)
    if compiled is None:
        return None
    if causal:
        return HopperBackward(compiled, causal, converts=query)
    return HopperBackward(compiled, causal, staggered=compiled > 64 and seqlen_k <= _STAGGERED_KEYS)


def all_configurations() -> tuple[HopperBackward, ...]:
    """That `configuration` gives."""
    return (
        *(HopperBackward(head_dim, False) for head_dim in HEAD_DIMS),
        HopperBackward(128, False, staggered=True),
        *(
            HopperBackward(head_dim, True, converts=query)
            for head_dim in HEAD_DIMS
            for query in (False, True)
        ),
    )


def key_heads_per_section(rows: int, head_dim: int) -> int:
    """How many key heads are worked on side by side; `rows`: query rows of all heads of a group."""
    least, most = _SECTION_HEADS
    return max(least, min(most, round(_SECTION_BYTES / (rows * head_dim * 8))))
