"""Attention in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from cudadent42.operations.attention.inputs import AttentionInputs
from cudadent42.operations.interface import OnChunk, nothing

_CHUNK_SCORES = {"cpu": 1 << 21, "cuda": 1 << 27}
"""Scores held at a time: 16 MB on CPU, where they should stay in cache; 1 GB on a GPU."""


def attention_float64(inputs: AttentionInputs, causal: bool, on_chunk: OnChunk = nothing) -> Tensor:
    """softmax(scale * Q K^T) V in float64, (batch, heads, seqlen_q, head_dim).

    Causal masks align bottom-right; a row with no key gives zeros. Computed by head and by chunks of rows,
    so the scores of a long sequence never exist at once; ``on_chunk`` is called after each: all of it can take
    minutes.
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    batch, heads, seqlen_q, _ = query.shape
    kv_heads, seqlen_k = key.shape[1], key.shape[2]
    result = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    if seqlen_k == 0 or seqlen_q == 0:
        return result
    offset = seqlen_k - seqlen_q
    first = max(0, -offset) if causal else 0
    rows = max(1, _CHUNK_SCORES[query.device.type] // seqlen_k)
    for b in range(batch):
        for h in range(heads):
            keys = key[b, h * kv_heads // heads].double()
            values = value[b, h * kv_heads // heads].double()
            for start in range(first, seqlen_q, rows):
                stop = min(start + rows, seqlen_q)
                seen = min(seqlen_k, stop + offset) if causal else seqlen_k
                scores = query[b, h, start:stop].double() @ keys[:seen].T * inputs.scale
                if causal:
                    row = torch.arange(start, stop, dtype=torch.int64, device=query.device)[:, None]
                    column = torch.arange(seen, dtype=torch.int64, device=query.device)
                    hidden = column > row + offset
                    scores.masked_fill_(hidden, -torch.inf)
                result[b, h, start:stop] = weighted(torch.softmax(scores, dim=-1), values[:seen])
                on_chunk()
    return result


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """``weights @ values``, where a weight of zero hides a NaN or an infinity."""
    strange = ~torch.isfinite(values).all(dim=-1)
    if not bool(strange.any()):
        return weights @ values
    result = weights @ values.masked_fill(strange[:, None], 0.0)
    for index in strange.nonzero()[:, 0].tolist():
        weight = weights[:, index, None]
        result += torch.where(weight == 0, 0.0, weight * values[index])
    return result
