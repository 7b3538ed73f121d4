"""One backward pass of attention, and one training step of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cudadent42.model.cases import element_bytes
from cudadent42.operations.attention.case import AttentionCase


@dataclass(frozen=True)
class AttentionBackwardCase(AttentionCase):
    """The gradients of query, key and value for a problem of attention whose forward pass is done."""

    operation: ClassVar[str] = "attention_backward"

    @property
    def flops(self) -> int:
        """Of five matrix products: the scores and the gradients of probabilities, value, query and key."""
        return 10 * self.scores * self.head_dim

    @property
    def bytes_min(self) -> int:
        """Fewest bytes moved: query, key, value, output and its gradient read once, three gradients written once, and
        one float32 for each row."""
        rows = self.batch * self.num_heads * self.seqlen_q
        keys = self.batch * self.num_kv_heads * self.seqlen_k
        return element_bytes(self.dtype) * self.head_dim * (4 * rows + 4 * keys) + 4 * rows

    def memory_bytes(self, sets: int) -> int:
        """With what autograd keeps of the forward pass of each set."""
        return sets * (self.bytes_min + self.gap_bytes)


@dataclass(frozen=True)
class AttentionTrainingStepCase(AttentionBackwardCase):
    """A forward pass and its backward pass, as a training step calls them."""

    operation: ClassVar[str] = "attention_training_step"

    @property
    def flops(self) -> int:
        """Of two matrix products forward and five backward."""
        return 14 * self.scores * self.head_dim
