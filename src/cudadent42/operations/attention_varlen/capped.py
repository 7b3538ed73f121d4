"""Attention with a soft cap by PyTorch's operations, in the place of SDPA, which has none."""

from __future__ import annotations

import torch
from torch import Tensor


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    softcap: float,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention`: (1, heads, queries, dim) of (1, kv_heads, keys, dim).

    Scores are rounded to the dtype and capped in it, as transformers' eager attention does; the softmax is in float32.
    """
    if enable_gqa:
        group = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value
