"""The Hopper kernel of attention backward for short sequences: data."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashmoe_science.configs.ablation import Ablation

HEAD_DIM = 64
"""Compiled head dimension; TMA pads a smaller one."""
BLOCK_N = 128
"""Keys per block: 64 for each of two consumer warpgroups."""
BLOCK_M = 64
"""Query rows per step."""
BLOCKS = 8
"""Steps of query rows, over all heads that share keys, whose sums of dQ a block has room for beside all else."""
MOST_KEYS = 512
"""Beyond, a head's blocks of keys, one after another, take longer than those of several heads side by side."""
_LEAST_FILLED = ((1, 0.0), (2, 0.7), (MOST_KEYS // BLOCK_N, 0.9))
"""Up to so many blocks of keys, this share of all multiprocessors' time has to be filled with heads: the other kernel
shares a head's blocks of keys out. Measured on an H200 with 8 to 300 heads (docs/kernels/backward-short.md)."""
_QUERY_STAGES = 4
_GRADIENT_STAGES = 2
_HEADS = 2
"""Whose rows' statistics are there."""
_ROW_BYTES = 2 * HEAD_DIM


@dataclass(frozen=True)
class ShortBackward:
    """See `kernels/cuda/attention_backward_short.cu`."""

    causal: bool
    ablation: Ablation = field(default=Ablation.NONE, kw_only=True)

    @property
    def head_dim(self) -> int:
        return HEAD_DIM

    @property
    def threads(self) -> int:
        return 3 * 128

    @property
    def shared_bytes(self) -> int:
        """Keys, score gradients; rings of queries and output gradients, an output; sums, statistics and barriers."""
        rows = 2 * BLOCK_N + (_QUERY_STAGES + _GRADIENT_STAGES + 1) * BLOCK_M
        sums = BLOCKS * BLOCK_M * HEAD_DIM * 4
        statistics = 2 * _HEADS * BLOCKS * BLOCK_M * 4
        barriers = 7 * 8 + (_QUERY_STAGES + _GRADIENT_STAGES + _HEADS) * 16 + _GRADIENT_STAGES * 8
        return rows * _ROW_BYTES + sums + statistics + barriers


def fits(*, group: int, seqlen_q: int) -> bool:
    """Whether a block has room for the sums of all rows of ``group`` query heads."""
    return group * -(-seqlen_q // BLOCK_M) <= BLOCKS


def pays(*, heads: int, seqlen_k: int, multiprocessors: int) -> bool:
    """Whether it is the quickest kernel. ``heads``: of keys, in the whole batch."""
    rounds = -(-heads // multiprocessors)
    blocks = -(-seqlen_k // BLOCK_N)
    if rounds == 0:
        return False
    filled = heads / (rounds * multiprocessors)
    return any(blocks <= most and filled >= least for most, least in _LEAST_FILLED)


def all_configurations() -> tuple[ShortBackward, ...]:
    return ShortBackward(False), ShortBackward(True)
