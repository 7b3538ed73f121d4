"""Attention over a batch of sequences in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from cudadent42.operations.attention.reference import weighted
from cudadent42.operations.attention_varlen.case import VarlenCase
from cudadent42.operations.attention_varlen.inputs import VarlenInputs
from cudadent42.operations.attention_varlen.tree_masks import hidden_by_tree
from cudadent42.operations.interface import OnChunk

_CHUNK_SCORES = {"cpu": 1 << 21, "cuda": 1 << 27}
"""Scores held at a time: 16 MB on CPU, 1 GB on a GPU."""


def varlen_float64(case: VarlenCase, inputs: VarlenInputs, on_chunk: OnChunk) -> Tensor:
    """(tokens, heads, head_dim_v): sequence by sequence, head by head, by chunks of rows; rows without keys are zeros.

    Over a cache in FP8 it is what an ideal kernel gets: float64 with the elements times their scales.
    """
    query = inputs.query
    device = query.device
    result = torch.zeros(inputs.result_like.shape, dtype=torch.float64, device=device)
    keys_cache, values_cache = inputs.caches
    left, right = case.sides
    group = case.num_heads // case.num_kv_heads
    token = first_key = 0
    for index, (queries, keys) in enumerate(zip(case.seqlens_q, case.seqlens_k, strict=True)):
        has_tree = bool(case.words(index))
        slots = inputs.slots[first_key : first_key + keys]
        first_key += keys
        rows = max(1, _CHUNK_SCORES[device.type] // max(1, keys))
        for head in range(case.num_heads if keys else 0):
            key, value = (cache.exact(slots, head // group) for cache in (keys_cache, values_cache))
            for start in range(0, queries, rows):
                stop = min(start + rows, queries)
                position = (
                    torch.arange(start, stop, dtype=torch.int64, device=device)[:, None] + keys - queries
                )
                column = torch.arange(keys, dtype=torch.int64, device=device)
                hidden = torch.zeros(stop - start, keys, dtype=torch.bool, device=device)
                if left >= 0:
                    hidden |= column < position - left
                if right >= 0:
                    hidden |= column > position + right
                if has_tree and inputs.tree_mask is not None:
                    hidden |= hidden_by_tree(inputs.tree_mask[token + start : token + stop], queries, keys)
                scores = query[token + start : token + stop, head].double() @ key.T * case.head_dim**-0.5
                if case.softcap:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                if inputs.alibi_slopes is not None:
                    scores = scores - inputs.alibi_slopes[head].double() * (position - column).abs()
                scores = scores.masked_fill(hidden, -torch.inf)
                if inputs.sinks is not None:
                    scores = torch.cat((scores, inputs.sinks[head].double().expand(stop - start, 1)), dim=-1)
                weights = torch.softmax(scores, dim=-1)[:, :keys]
                weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0.0)
                result[token + start : token + stop, head] = weighted(weights, value)
                on_chunk()
        token += queries
    return result
