"""What a call of attention backward asks for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from flashmoe_science.cuda.attention.problem import Strides
from flashmoe_science.gradients import Needs


class GradientKind(Enum):
    """The kernels of attention's backward pass for CUDA."""

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

    @property
    def statistics_rows(self) -> int:
        """Rows per head of the arrays of statistics, float32, of which each head's start at a multiple of 16 bytes."""
        return -(-self.seqlen_q // 4) * 4
