"""One problem of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cudadent42.model.cases import element_bytes


@dataclass(frozen=True)
class MoeCase:
    """One mixture-of-experts forward: sizes, dtype, activation, biases and layout."""

    operation: ClassVar[str] = "moe"

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
    weight_bits: int = 0
    """8 or 4: the experts' weights are numbers of so many bits times scales; 0: they have the dtype alone."""
    group: int = 0
    """Weights along the depth that share a scale."""
    bias: bool = False
    """Both products have biases."""
    w13_layout: str = "concat"
    """A value of ``flashmoe_science.moe_arguments.W13Layout``."""

    @property
    def id(self) -> str:
        """Unique in a plan: ``name/dtype``."""
        return f"{self.name}/{self.dtype}"

    @property
    def gated(self) -> bool:
        """Whether w13 holds gate and up projections, or one alone."""
        return not self.activation.endswith("_no_mul")

    @property
    def expert_biases(self) -> int:
        """Entries of one expert's biases."""
        return (2 if self.gated else 1) * self.intermediate + self.hidden if self.bias else 0

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
        return self._stored_bytes(self.experts_touched) + self._token_bytes

    @property
    def _token_bytes(self) -> int:
        """Of hidden states, output, and routing (float32 weights, int32 ids)."""
        return 2 * element_bytes(self.dtype) * self.tokens * self.hidden + 8 * self.tokens * self.top_k

    def _stored_bytes(self, experts: int) -> int:
        """Of the weights of so many experts, in their smallest form."""
        size, weights = element_bytes(self.dtype), experts * (self.expert_weights + self.expert_biases)
        if not self.weight_bits:
            return size * weights
        return weights * self.weight_bits // 8 + size * weights // self.group

    def memory_bytes(self, sets: int) -> int:
        """Bytes of so many sets of inputs, with an output each; they share the experts' weights, which are there in the
        dtype too."""
        weights = element_bytes(self.dtype) * self.experts * (self.expert_weights + self.expert_biases)
        stored = self._stored_bytes(self.experts) if self.weight_bits else 0
        return weights + stored + sets * self._token_bytes
