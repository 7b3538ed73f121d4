"""One problem of an operation: its sizes and dtype, and what follows from them without measuring.

Every case has a name, dtype, id, operation, tokens, flops, bytes_min and memory_bytes; planning, timing, comparing
and reporting use these only. The rest belongs to the operation (`cudadent42.operations`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar


class Operation(str, Enum):
    """What is raced."""

    ATTENTION = "attention"
    MOE = "moe"


@dataclass(frozen=True)
class AttentionCase:
    """One attention problem: shape, dtype and mask."""

    operation: ClassVar[Operation] = Operation.ATTENTION

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


@dataclass(frozen=True)
class MoeCase:
    """One mixture-of-experts forward: sizes, dtype and activation."""

    operation: ClassVar[Operation] = Operation.MOE

    name: str
    dtype: str
    """``fp16``, ``bf16`` or ``fp32``."""
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: str = "silu"
    """A value of ``flashmoe_science.moe_arguments.Activation``."""

    @property
    def id(self) -> str:
        """Unique in a plan: ``name/dtype``."""
        return f"{self.name}/{self.dtype}"

    @property
    def gated(self) -> bool:
        """Whether w13 holds gate and up projections, or one alone."""
        return not self.activation.endswith("_no_mul")

    @property
    def expert_weights(self) -> int:
        """Entries of one expert's w13 and w2."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products."""
        return 2 * self.tokens * self.top_k * self.expert_weights

    @property
    def experts_touched(self) -> int:
        """Experts that at least one token chose, as expected of uniform routing; the skew of the inputs' routing lowers
        it by a few."""
        missed = (1 - self.top_k / self.experts) ** self.tokens
        return max(min(self.top_k, self.tokens * self.top_k), round(self.experts * (1 - missed)))

    @property
    def bytes_min(self) -> int:
        """Fewest bytes moved: hidden states, routing and touched experts read once, output written once."""
        size = element_bytes(self.dtype)
        return size * self.experts_touched * self.expert_weights + self._token_bytes

    @property
    def _token_bytes(self) -> int:
        """Of hidden states, output, and routing (float32 weights, int32 ids)."""
        return 2 * element_bytes(self.dtype) * self.tokens * self.hidden + 8 * self.tokens * self.top_k

    def memory_bytes(self, sets: int) -> int:
        """Bytes of so many sets of inputs, with an output each; they share the experts' weights."""
        return element_bytes(self.dtype) * self.experts * self.expert_weights + sets * self._token_bytes


Case = AttentionCase | MoeCase
"""A case of any operation. Its fields tell which when it is read back."""


def element_bytes(dtype: str) -> int:
    return 4 if dtype == "fp32" else 2
