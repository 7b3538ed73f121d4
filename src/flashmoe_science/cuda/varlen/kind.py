"""The kernels of attention over sequences of any lengths, by name, and what decides between them of a length."""

from __future__ import annotations

from enum import Enum

from flashmoe_science.varlen.problem import Problem, Sizes


class VarlenKernel(Enum):
    """The kernels."""

    DECODE = "decode"
    DECODE_HOPPER = "decode_hopper"
    HOPPER = "hopper"
    MIXED_HOPPER = "mixed_hopper"
    PORTABLE = "portable"


def bucket(max_seqlen_q: int) -> int:
    """The power of two, less one, that no sequence of such a call exceeds: all of a length that plans know."""
    return (1 << max_seqlen_q.bit_length()) - 1


def packed_rows(problem: Problem, sizes: Sizes) -> int:
    """Query tokens of a sequence times heads that share a key, at most."""
    return sizes.max_seqlen_q * (problem.num_heads // problem.num_kv_heads)


def most_keys_seen(problem: Problem, sizes: Sizes) -> int:
    """That rows of a sequence see."""
    if problem.window_left < 0:
        return sizes.max_seqlen_k
    return min(problem.window_left + sizes.max_seqlen_q, sizes.max_seqlen_k)
