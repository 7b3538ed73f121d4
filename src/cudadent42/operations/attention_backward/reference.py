"""The gradients of attention in float64, and how far a rounded computation may lie from each entry of them.

S = scale Q K^T, P = softmax(S), O = P V, Δ = rowsum(O ∘ dO), dP = dO V^T, dS = P ∘ (dP - Δ);
dQ = scale dS K, dK = scale dS^T Q, dV = P^T dO. (Dao et al., FlashAttention, 2022, arXiv:2205.14135, section B.2.)
"""

from __future__ import annotations

import torch

from cudadent42.operations.attention_backward.inputs import BackwardInputs, packed
from cudadent42.operations.interface import Exact, OnChunk, nothing

_CHUNK_SCORES = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Scores whose matrices are held at a time, about ten of them in float64."""

FACTOR = 1.5
"""On top of the error's bound to first order, for what it leaves out."""

_ACCUMULATED = 2.0**-23
"""Unit of float32 sums."""

_EXPONENTIAL = 2e-6
"""Relative error of an exponential by polynomial or by the special function unit."""


def gradients_float64(inputs: BackwardInputs, causal: bool, on_chunk: OnChunk = nothing) -> Exact:
    """By head and by chunks of rows, so the scores of a long sequence never exist at once.

    The limit follows the roundings that no method avoids when its operands have the inputs' dtype. P and dS are
    rounded once before they are multiplied (unit u), exponentials and sums have float32's errors, and Δ is taken of
    an output that was rounded. Where P is peaked dP - Δ cancels, and that term is the largest. Causal masks align
    bottom-right.
    """
    query, key, value, gradient = inputs.tensors
    scale = float(query.shape[-1]) ** -0.5 if inputs.softmax_scale is None else inputs.softmax_scale
    unit = torch.finfo(query.dtype).eps / 2
    batch, heads, seqlen_q, _ = query.shape
    kv_heads, seqlen_k = key.shape[1], key.shape[2]
    exact = [
        torch.zeros(tensor.shape, dtype=torch.float64, device=query.device) for tensor in (query, key, value)
    ]
    spread = [torch.zeros_like(tensor) for tensor in exact]
    offset = seqlen_k - seqlen_q
    rows = max(1, _CHUNK_SCORES[query.device.type] // max(1, seqlen_k))
    summed = _ACCUMULATED * max(seqlen_q * heads // kv_heads, seqlen_k, query.shape[-1]) ** 0.5 * 4
    for b in range(batch):
        for h in range(heads):
            g = h * kv_heads // heads
            keys, values = key[b, g].double(), value[b, g].double()
            for start in range(max(0, -offset) if causal else 0, seqlen_q, rows):
                stop = min(start + rows, seqlen_q)
                queries, outer = query[b, h, start:stop].double(), gradient[b, h, start:stop].double()
                scores = queries @ keys.T * scale
                if causal:
                    row = torch.arange(start, stop, dtype=torch.int64, device=query.device)[:, None]
                    scores.masked_fill_(
                        torch.arange(seqlen_k, dtype=torch.int64, device=query.device) > row + offset,
                        -torch.inf,
                    )
                weights = torch.softmax(scores, dim=-1)
                output = weights @ values
                delta = (output * outer).sum(-1, keepdim=True)
                inner = outer @ values.T
                change = weights * (inner - delta)
                exact[0][b, h, start:stop] = scale * change @ keys
                exact[1][b, g] += scale * change.T @ queries
                exact[2][b, g] += weights.T @ outer

                size = torch.where(weights > 0, scores.abs(), 0.0).amax(-1, keepdim=True) if seqlen_k else 0.0
                relative = _EXPONENTIAL + _ACCUMULATED * 2 * size + summed
                rounded_delta = unit * (output * outer).abs().sum(-1, keepdim=True)
                off = (unit + summed) * change.abs() + weights * (
                    relative * (inner.abs() + delta.abs())
                    + summed * (outer.abs() @ values.abs().T)
                    + rounded_delta
                )
                spread[0][b, h, start:stop] = abs(scale) * off @ keys.abs()
                spread[1][b, g] += abs(scale) * off.T @ queries.abs()
                spread[2][b, g] += ((unit + relative) * weights).T @ outer.abs()
                on_chunk()
    smallest = torch.finfo(query.dtype).smallest_normal * unit * 2
    limits = [
        FACTOR * (wide + unit * value.abs()) + smallest for wide, value in zip(spread, exact, strict=True)
    ]
    return Exact(packed(exact), packed(limits))
