"""@NAME@: attention from plain PyTorch operations, as a starting point."""

import torch


def attention(query, key, value, *, causal, softmax_scale):
    """Exact attention; output like query.

    query (batch, heads, seqlen_q, head_dim); key and value (batch, kv_heads, seqlen_k, head_dim), all of one dtype.
    Query head h uses key/value head h // (heads // kv_heads). Causal masks align bottom-right; softmax_scale None is
    1/sqrt(head_dim).
    """
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    rows, columns = scores.shape[-2:]
    if causal:
        seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
        scores = scores.masked_fill(~seen, float("-inf"))
    output = scores.softmax(-1) @ value.float()
    if causal and rows > columns:
        output[..., : rows - columns, :] = 0  # rows that see no key
    return output.to(query.dtype)
