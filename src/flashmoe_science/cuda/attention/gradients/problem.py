"""What a call of attention backward asks for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from flashmoe_science.cuda.attention.problem import Strides, strides_of
from flashmoe_science.errors import InputError
from flashmoe_science.gradients import Needs


class GradientKind(Enum):
    """The kernels of attention's backward pass for CUDA."""

    SHORT = "short"
    HOPPER = "hopper"
    TWO_PASS = "two_pass"
    PORTABLE = "portable"


@dataclass(frozen=True)
class BackwardProblem:
    """One call of attention backward: shapes, layout and options."""

    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: torch.dtype
    causal: bool
    softmax_scale: float
    needs: Needs
    query_strides: Strides
    key_strides: Strides
    value_strides: Strides
    output_strides: Strides
    grad_output_strides: Strides
    grad_query_strides: Strides
    grad_key_strides: Strides
    grad_value_strides: Strides
    window_left: int = -1
    """Row i sees key j only if j >= i + seqlen_k - seqlen_q - window_left; -1: no such limit."""
    window_right: int = -1
    """... and only if j <= i + seqlen_k - seqlen_q + window_right; -1: no such limit. Not with `causal`, which is 0."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0: they stay."""

    @property
    def is_plain(self) -> bool:
        """Without a window and a cap, which `causal` is not."""
        return self.window_left < 0 and self.window_right < 0 and self.softcap == 0

    @property
    def statistics_rows(self) -> int:
        """Rows per head of the arrays of statistics, float32, of which each head's start at a multiple of 16 bytes."""
        return -(-self.seqlen_q // 4) * 4


def is_readable(tensor: torch.Tensor) -> bool:
    """Rows are contiguous, start at multiples of 16 bytes if the tensor does, and do not repeat."""
    try:
        strides = strides_of("grad_output", tensor)
    except InputError:
        return False
    return all(stride > 0 or size <= 1 for stride, size in zip(strides, tensor.shape, strict=False))
