"""What the kernel of attention over sequences of any lengths is passed: the fields of `varlen/parameters.cuh`."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

PER_CALL = struct.Struct("11Q 2q 4i")
"""Addresses of query, key, value, output, lse, query_starts, key_starts, key_counts, page_table, sinks, alibi_slopes;
table_row, alibi_batch; batch, num_tokens, num_tiles, slices_per_section.
"""
_PER_PLAN = struct.Struct("15q 9i 5I 3f I i 2I 4x")
TREE_MASK = struct.Struct("Q")
"""Its address: of a call too, and after all that kernels without trees read."""
TREE_MASK_AT = PER_CALL.size + _PER_PLAN.size
ARGUMENT_BYTES = TREE_MASK_AT + TREE_MASK.size
UNLIMITED = 1 << 30
"""A window's side that hides nothing."""
MOST_ROWS = 1 << 30
"""Of rows and keys, that the kernel can divide."""
_FLIP_SIGNS = 0x80008000

ByteStrides = tuple[int, int, int]
"""Of (batch or page, head, row), in bytes."""


@dataclass(frozen=True)
class PlanArguments:
    """What all calls of a plan share. See `varlen/parameters.cuh`."""

    query: ByteStrides
    key: ByteStrides
    value: ByteStrides
    output: ByteStrides
    lse: tuple[int, int, int]
    """Of (batch, head, row), in elements."""
    num_slices: int
    heads_per_kv_head: int
    head_dim: int
    value_dim: int
    window_left: int
    """-1: no limit."""
    window_right: int
    softmax_scale: float
    """Not zero."""
    softcap: float
    page_size: int = 1
    seqlen_q: int = 0
    seqlen_k: int = 0
    tiles_per_sequence: int = 1
    chunk: int = 0

    def pack_into(self, buffer: Any) -> None:
        scale_log2 = abs(self.softmax_scale) * math.log2(math.e)
        strides = (self.query, self.key, self.value, self.output, self.lse)
        _PER_PLAN.pack_into(
            buffer,
            PER_CALL.size,
            *(stride for tensor in strides for stride in tensor),
            self.num_slices,
            self.heads_per_kv_head,
            self.seqlen_q,
            self.seqlen_k,
            self.tiles_per_sequence,
            self.head_dim,
            self.value_dim,
            _side(self.window_left),
            _side(self.window_right),
            self.page_size,
            *division(self.page_size),
            *division(self.heads_per_kv_head),
            scale_log2,
            self.softcap * math.log2(math.e),
            2 * scale_log2 / self.softcap if self.softcap else 0.0,
            _FLIP_SIGNS if self.softmax_scale < 0 else 0,
            self.chunk,
            *division(self.chunk or 1),
        )


def _side(keys: int) -> int:
    return UNLIMITED if keys < 0 else min(keys, UNLIMITED)


def division(divisor: int) -> tuple[int, int]:
    """Multiplier and shift with which x // divisor is umulhi(2 x, multiplier) >> shift for all x below 2^31.

    Reference: Granlund and Montgomery, Division by Invariant Integers using Multiplication (1994).
    """
    shift = (divisor - 1).bit_length()
    return -(-(1 << (31 + shift)) // divisor), shift
