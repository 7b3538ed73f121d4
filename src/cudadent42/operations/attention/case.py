"""One attention problem."""

from __future__ import annotations

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
            first = self.seqlen_k - self.seqlen_q + 1  # keys seen by query row 0
            rows = range(self.seqlen_q)
            pairs = sum(max(0, first + row) for row in rows)
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
        return sets * self.bytes_min
