"""A plug-in: attention that the lab verifies against float64 and races.

    cudadent42 run --implementation cudadent42,examples/my_attention.py:attention --suite small
"""

from __future__ import annotations

import torch


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, softmax_scale: float
) -> torch.Tensor:
    """Attention as the formula says it, in fp32. Shapes are (batch, heads, seq, head_dim)."""
    group = query.shape[1] // key.shape[1]
    keys, values = (each.float().repeat_interleave(group, dim=1) for each in (key, value))
    scores = query.float() @ keys.transpose(-1, -2) * softmax_scale
    if causal:
        rows, columns = scores.shape[-2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).triu(columns - rows + 1)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0.0)  # a row that sees no key gives zeros
    else:
        weights = torch.softmax(scores, dim=-1)
    return (weights @ values).to(query.dtype)
