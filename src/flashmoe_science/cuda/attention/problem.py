"""What a call of attention asks for, and how its tensors lie."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from flashmoe_science.errors import InputError

Strides = tuple[int, int, int]
"""Of (batch, head, row), in elements; the head dimension is contiguous."""


class KernelKind(Enum):
    """The attention kernels for CUDA."""

    SMALL = "small"
    HOPPER = "hopper"
    PORTABLE = "portable"


@dataclass(frozen=True)
class Problem:
    """One call of attention forward: shapes, layout and options."""

    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: torch.dtype
    causal: bool
    softmax_scale: float
    """Not zero."""
    return_lse: bool
    query_strides: Strides
    key_strides: Strides
    value_strides: Strides
    output_strides: Strides


def strides_of(name: str, tensor: torch.Tensor) -> Strides:
    """Those of dimensions of size 1 are never used: 0. Raises InputError for rows that the kernels cannot read."""
    shape, strides = tensor.shape, tensor.stride()
    if strides[3] != 1:
        raise InputError(
            f"{name} has stride {strides[3]} in its last dimension, expected 1; pass {name}.contiguous()"
        )
    used = tuple(0 if size <= 1 else stride for size, stride in zip(shape[:3], strides[:3], strict=True))
    if any(stride * tensor.element_size() % 16 for stride in used):
        raise InputError(
            f"{name} has strides {strides}, and rows must start at multiples of 16 bytes; "
            f"pass {name}.contiguous()"
        )
    return used[0], used[1], used[2]


def result_like(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the strides of a result like `tensor`: its order, unless that would split rows."""
    like = torch.empty_like(tensor, device="meta")
    if like.stride(3) == 1 and all(stride % 8 == 0 for stride in like.stride()[:3]):
        return like
    return torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format)
