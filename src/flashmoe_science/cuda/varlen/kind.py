"""The kernels of attention over sequences of any lengths, by name, and what decides between them of a length."""

from __future__ import annotations

from enum import Enum


class VarlenKernel(Enum):
    """The kernels."""

    DECODE = "decode"
    DECODE_HOPPER = "decode_hopper"
    HOPPER = "hopper"
    PORTABLE = "portable"


def bucket(max_seqlen_q: int) -> int:
    """The power of two, less one, that no sequence of such a call exceeds: all of a length that plans know."""
    return (1 << max_seqlen_q.bit_length()) - 1
