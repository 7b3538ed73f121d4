"""Arguments of the operators' tests."""

from __future__ import annotations

import torch

Tensors = tuple[torch.Tensor, ...]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attention_tensors(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seqlen_q: int = 20,
    seqlen_k: int = 30,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
) -> Tensors:
    return (
        random(batch, heads, seqlen_q, head_dim, seed=1, dtype=dtype),
        random(batch, kv_heads, seqlen_k, head_dim, seed=2, dtype=dtype),
        random(batch, kv_heads, seqlen_k, head_dim, seed=3, dtype=dtype),
    )


def differentiable(tensors: Tensors, needed: tuple[bool, ...] = (True, True, True)) -> Tensors:
    return tuple(
        tensor.detach().clone().requires_grad_(each) for tensor, each in zip(tensors, needed, strict=True)
    )
