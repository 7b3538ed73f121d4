"""One backward pass of a mixture of experts, and one training step of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cudadent42.model.cases import element_bytes
from cudadent42.operations.moe.case import MoeCase

ROUTINGS = ("router", "uniform", "zipf", "hot")
"""How tokens choose their experts: as a trained router's do, each expert alike, the r-th most popular with a weight of
1 / r, or every token one and the same expert beside others of its own."""


@dataclass(frozen=True)
class MoeBackwardCase(MoeCase):
    """The gradients of hidden states, both weights, the routing weights and biases, where the forward pass is done."""

    operation: ClassVar[str] = "moe_backward"

    routing: str = "router"
    """One of ``ROUTINGS``."""

    @property
    def flops(self) -> int:
        """Of four products, where the forward pass has two."""
        return 4 * self.tokens * self.top_k * self.expert_weights

    @property
    def bytes_min(self) -> int:
        """Fewest bytes moved: what the forward pass moves, the projections of each slot, the gradients of the output
        and of hidden states, and of all experts' weights."""
        size, slots = element_bytes(self.dtype), self.tokens * self.top_k
        weights = self.experts * (self.expert_weights + self.expert_biases)
        projections = slots * self.intermediate * (2 if self.gated else 1)
        return super().bytes_min + size * (weights + projections + self.tokens * self.hidden) + 4 * slots

    def memory_bytes(self, sets: int) -> int:
        """With what autograd keeps of a composition's forward pass of each set: rows before and after the experts and
        weighted, projections and activated values."""
        size, slots = element_bytes(self.dtype), self.tokens * self.top_k
        kept = slots * (3 * self.hidden + (3 if self.gated else 2) * self.intermediate)
        gradients = 2 * self.experts * (self.expert_weights + self.expert_biases)
        return super().memory_bytes(sets) + size * (sets * (kept + 2 * self.tokens * self.hidden) + gradients)


@dataclass(frozen=True)
class MoeTrainingStepCase(MoeBackwardCase):
    """A forward pass and its backward pass, as a training step calls them."""

    operation: ClassVar[str] = "moe_training_step"

    @property
    def flops(self) -> int:
        """Of two products forward and four backward."""
        return 6 * self.tokens * self.top_k * self.expert_weights
