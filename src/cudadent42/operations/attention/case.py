"""One attention problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cudadent42.model.cases import element_bytes


@dataclass(frozen=True)
class AttentionCase:
    """One attention problem: shape, dtype and mask."""

    operation: ClassVar[str] = "attention"

    name: str
    dtype: str
    """``fp16``, ``bf16`` or ``fp32``."""
    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False
    softmax_scale: float | None = None
    """None: 1/sqrt(head_dim)."""
    query_strides: tuple[int, ...] = ()
    """Of batch, heads and rows, in elements, where a row's entries lie side by side; empty for a contiguous tensor."""
    key_strides: tuple[int, ...] = ()
    value_strides: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        """Unique in a plan: ``name/dtype``."""
        return f"{self.name}/{self.dtype}"

    @property
    def tokens(self) -> int:
        return self.batch * self.seqlen_q

    @property
    def scores(self) -> int:
        """Number of query-key pairs that the mask lets through, over all heads (bottom-right aligned)."""
        pairs = self.seqlen_q * self.seqlen_k
        if self.causal:
            fewest = max(1, self.seqlen_k - self.seqlen_q + 1)  # keys of the first query row that sees any
            pairs = (
                (fewest + self.seqlen_k) * (self.seqlen_k - fewest + 1) // 2
            )  # each further row sees one more
        return self.batch * self.num_heads * pairs

    @property
    def flops(self) -> int:
        """Floating-point operations of the two matrix products."""
        return 4 * self.scores * self.head_dim

    @property
    def bytes_min(self) -> int:
        """Fewest bytes moved: query, key, value read once, output written once."""
        query = self.batch * self.num_heads * self.seqlen_q * self.head_dim
        key = self.batch * self.num_kv_heads * self.seqlen_k * self.head_dim
        return element_bytes(self.dtype) * (2 * query + 2 * key)

    def memory_bytes(self, sets: int) -> int:
        """Bytes of so many sets of inputs, with an output each."""
        return sets * (self.bytes_min + self.gap_bytes)

    @property
    def gap_bytes(self) -> int:
        """Between the rows of inputs whose strides say that other things lie there."""
        gaps = 0
        for shape, strides in self.laid_out():
            if strides:
                spanned = 1 + sum(
                    (size - 1) * stride for size, stride in zip(shape, (*strides, 1), strict=True)
                )
                gaps += max(0, spanned - math.prod(shape))
        return element_bytes(self.dtype) * gaps

    def laid_out(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Shape and strides of query, key and value."""
        query = (self.batch, self.num_heads, self.seqlen_q, self.head_dim)
        key = (self.batch, self.num_kv_heads, self.seqlen_k, self.head_dim)
        return (query, self.query_strides), (key, self.key_strides), (key, self.value_strides)


def overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether entries may share a place in memory."""
    spanned = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride < spanned:
                return True
            spanned += (size - 1) * stride
    return False
