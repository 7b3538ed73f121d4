"""Dense calls of attention with a window, a cap and sinks, as calls of attention over sequences of any lengths."""

from __future__ import annotations

import pytest
import torch
from varlen_reference import assert_as_exact_as_pytorch

DENSE = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

each_option = pytest.mark.parametrize(
    ("causal", "window", "softcap", "with_sinks"),
    [
        (True, (100, 0), 0.0, True),
        (False, (30, 7), 0.0, False),
        (True, (-1, -1), 20.0, False),
        (False, (-1, -1), 0.0, True),
        (True, (64, 0), 5.0, True),
    ],
)


def dense(
    batch: int, heads: tuple[int, int], lengths: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> DENSE:
    """Query, key and value on the CPU, of unequal strides."""
    generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
    query = torch.randn(batch, lengths[0], heads[0], head_dim, generator=generator).transpose(1, 2)
    key = torch.randn(batch, heads[1], lengths[1], head_dim, generator=generator)
    value = torch.randn(batch, lengths[1], heads[1], head_dim, generator=generator).transpose(1, 2)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def check_dense(
    output: torch.Tensor, lse: torch.Tensor, tensors: DENSE, sinks: torch.Tensor | None, **options: object
) -> None:
    """Against float64: see `varlen_reference.assert_as_exact_as_pytorch`."""
    query, key, value = tensors
    batch, heads, seqlen_q, head_dim = query.shape
    call = {
        "query": query.transpose(1, 2).reshape(-1, heads, head_dim),
        "key": key.transpose(1, 2).reshape(-1, *key.shape[1::2]),
        "value": value.transpose(1, 2).reshape(-1, *value.shape[1::2]),
        "cu_seqlens_q": torch.arange(batch + 1) * seqlen_q,
        "cu_seqlens_k": torch.arange(batch + 1) * key.shape[2],
    }
    if sinks is not None:
        call["sinks"] = sinks
    assert lse.shape == (batch, heads, seqlen_q)
    packed = output.transpose(1, 2).reshape(-1, heads, head_dim)
    assert_as_exact_as_pytorch(packed, lse.transpose(1, 2).reshape(-1, heads), call, **options)
