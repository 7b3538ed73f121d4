"""Tiles of the Hopper kernel of attention backward: data."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashmoe_science.configs.ablation import Ablation

HEAD_DIMS = (64, 128)
"""Head dimensions that are compiled; TMA pads a tensor's to the next of these."""
BLOCK_N = 128
"""Keys per block: 64 for each of two consumer warpgroups."""
PIECES = 2
"""Of dQ; each consumer computes one piece of a block of query rows."""
_WIDE_ROWS = 80
"""Of queries in a step at head dimension 128: as many as registers hold beside the sums of keys and values."""
PREPARE_THREADS = 256
PREPARE_DEPTH = 2
"""Rows that a thread has on the way where statistics are prepared."""
SWIZZLE_PANEL = 64
"""Columns of a shared-memory panel with the 128-byte swizzle."""
_STAGES = 2
_BARRIER_BYTES = 32 + 3 * _STAGES * 16 + _STAGES * 8 + _STAGES * 32 + 2 * 8 + 16
"""Of keys; of queries, their gradients and pieces; of scores; of tiles, with their slots; of sums, with their tile."""
_STAGGERED_KEYS = 768
"""With head dimensions above 64 and no mask. Up to so many, staggered tiles take 0.91 of the time on an H100 and 1.02
of it on an H200; elsewhere they are slower on both."""
_WIDE_MOST_PADDING = 1.05
"""Rows of whole steps of 80 over those of whole steps of 64: of 1.07 to 1.25, which few queries have, longer steps were
0.86 to 0.95 times as fast, of 1.04 or less 0.97 to 1.08 times (docs/kernels/notebooks/backward-hopper.md)."""
_WIDE_CAUSAL_KEYS = 8192
"""With a mask, steps of 80 query rows pay from so many keys on: they take one launch more, which converts the sums."""
_SECTION_BYTES = 32 << 20
_SECTION_HEADS = (16, 64)
"""Least and most, if queries are not many. With few, blocks wait for each other: a tile adds its part of dQ after the
tile with the keys before, and the way there and back is longer than a step. With many, the sums of dQ, which are read
and written at every step, fall out of L2. Measured on an H200 (docs/kernels/backward-hopper.md)."""
_LONG_SECTIONS = ((16384, 4), (4096, 8))
"""From so many query rows on, so many heads: the wait at the start weighs little, and fewer heads take less energy."""


@dataclass(frozen=True)
class HopperBackward:
    """See `kernels/cuda/attention_backward_hopper.cu`."""

    head_dim: int
    """Compiled head dimension."""
    causal: bool
    converts: bool = False
    """A warp makes dQ of its sums, in place of a kernel that runs after it. With a mask alone."""
    staggered: bool = False
    """Tiles of a head side by side, at no time two at the same query rows. Without a mask alone."""
    wide: bool = False
    """80 query rows per step in place of 64, and the gradient of the query transposed. At head dimension 128."""
    window: bool = False
    """A row does not see keys that are too far before it. With a mask alone, and not `wide`."""
    ablation: Ablation = field(default=Ablation.NONE, kw_only=True)

    @property
    def block_m(self) -> int:
        """Query rows per step."""
        return _WIDE_ROWS if self.wide else 8192 // self.head_dim

    @property
    def piece_floats(self) -> int:
        """Of the gradient of the query that a consumer computes at a step."""
        return self.block_m * self.head_dim // PIECES

    @property
    def threads(self) -> int:
        return 3 * 128

    @property
    def convert_threads(self) -> int:
        return self.block_m * self.head_dim // 32

    @property
    def lanes(self) -> int:
        """That share a row where statistics are prepared, eight elements each."""
        return self.head_dim // 8

    @property
    def shared_bytes(self) -> int:
        row_bytes = 2 * self.head_dim
        keys = 2 * BLOCK_N * row_bytes
        rings = 2 * _STAGES * self.block_m * row_bytes
        scores = _STAGES * self.block_m * BLOCK_N * 2
        pieces = (1 + self.converts) * PIECES * self.piece_floats * 4
        statistics = 2 * _STAGES * self.block_m * 4 + self.converts * SWIZZLE_PANEL * 4
        return keys + rings + scores + pieces + statistics + _BARRIER_BYTES


def configuration(
    head_dim: int, causal: bool, *, seqlen_q: int, seqlen_k: int, query: bool = True, window: bool = False
) -> HopperBackward | None:
    """None if the head dimension is larger than those that are compiled. ``query``: its gradient is asked for.
    ``window``: with ``causal`` alone.
    """
    compiled = next((size for size in HEAD_DIMS if size >= head_dim), None)
    if compiled is None:
        return None
    if window:
        return HopperBackward(compiled, causal, converts=query, window=True)
    wide = compiled == 128 and _rounded(seqlen_q, _WIDE_ROWS) <= _WIDE_MOST_PADDING * _rounded(seqlen_q, 64)
    if causal and (not wide or seqlen_k < _WIDE_CAUSAL_KEYS):
        return HopperBackward(compiled, causal, converts=query)
    staggered = compiled > 64 and not causal and seqlen_k <= _STAGGERED_KEYS
    return HopperBackward(compiled, causal, staggered=staggered, wide=wide and not staggered)


def _rounded(rows: int, step: int) -> int:
    return -(-rows // step) * step


def all_configurations() -> tuple[HopperBackward, ...]:
    """That `configuration` gives."""
    return (
        *(HopperBackward(head_dim, False) for head_dim in HEAD_DIMS),
        HopperBackward(128, False, staggered=True),
        *(HopperBackward(128, causal, wide=True) for causal in (False, True)),
        *(
            HopperBackward(head_dim, True, converts=query, window=window)
            for head_dim in HEAD_DIMS
            for query in (False, True)
            for window in (False, True)
        ),
    )


def key_heads_per_section(tile: HopperBackward, rows: int, head_dim: int) -> int:
    """How many key heads are worked on side by side; `rows`: query rows of all heads of a group."""
    for long, heads in _LONG_SECTIONS[tile.causal :]:
        if rows >= long and (tile.wide or not tile.causal):
            return heads
    least, most = _SECTION_HEADS
    return max(least, min(most, round(_SECTION_BYTES / (rows * head_dim * 8))))
