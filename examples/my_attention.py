"""A plug-in: attention that the lab verifies against float64 and races.

cudadent42 run --implementation cudadent42,examples/my_attention.py:attention --suite small
"""

from __future__ import annotations

import torch


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
) -> torch.Tensor:
    """Attention as its formula says it, in fp32. Shapes are (batch, heads, seq, head_dim)."""
    group = query.shape[1] // key.shape[1]
    keys, values = (each.float().repeat_interleave(group, dim=1) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = query.float() @ keys.transpose(-1, -2) * scale
    rows, columns = scores.shape[-2:]
    if causal:
        seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
        scores = scores.masked_fill(~seen, float("-inf"))
    output = scores.softmax(-1) @ values
    if causal and rows > columns:
        output[..., : rows - columns, :] = 0  # rows that see no key
    return output.to(query.dtype)
