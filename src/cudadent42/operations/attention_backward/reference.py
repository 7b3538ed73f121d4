"""The gradients of attention in float64, and how far a rounded computation may lie from each entry of them.

S = scale Q K^T, P = softmax(S), O = P V, Δ = rowsum(O ∘ dO), dP = dO V^T, dS = P ∘ (dP - Δ);
dQ = scale dS K, dK = scale dS^T Q, dV = P^T dO. (Dao et al., FlashAttention, 2022, arXiv:2205.14135, section B.2.)
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    bottom-right; NaN and infinities that a row does not see are in none of its sums.
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
    hides = causal and not all(bool(tensor.isfinite().all()) for tensor in inputs.tensors)
    summed = _ACCUMULATED * max(seqlen_q * heads // kv_heads, seqlen_k, query.shape[-1]) ** 0.5 * 4
    for b in range(batch):
        for h in range(heads):
            g = h * kv_heads // heads
            keys, values = key[b, g].double(), value[b, g].double()
            for start in range(max(0, -offset) if causal else 0, seqlen_q, rows):
                stop = min(start + rows, seqlen_q)
                queries, outer = query[b, h, start:stop].double(), gradient[b, h, start:stop].double()
                scores = queries @ keys.T * scale
                seen = None
                if causal:
                    row = torch.arange(start, stop, dtype=torch.int64, device=query.device)[:, None]
                    hidden = torch.arange(seqlen_k, dtype=torch.int64, device=query.device) > row + offset
                    scores.masked_fill_(hidden, -torch.inf)
                    seen = ~hidden if hides else None
                seen_by = None if seen is None else seen.T
                weights = _of_seen(torch.softmax(scores, dim=-1), seen)
                output = _product(weights, values, seen)
                delta = (output * outer).sum(-1, keepdim=True)
                inner = outer @ values.T
                change = _of_seen(weights * (inner - delta), seen)
                exact[0][b, h, start:stop] = scale * _product(change, keys, seen)
                exact[1][b, g] += scale * _product(change.T, queries, seen_by)
                exact[2][b, g] += _product(weights.T, outer, seen_by)

                size = torch.where(weights > 0, scores.abs(), 0.0).amax(-1, keepdim=True) if seqlen_k else 0.0
                relative = _EXPONENTIAL + _ACCUMULATED * 2 * size + summed
                rounded_delta = unit * (output * outer).abs().sum(-1, keepdim=True)
                off = (unit + summed) * change.abs() + weights * (
                    relative * (inner.abs() + delta.abs())
                    + summed * (outer.abs() @ values.abs().T)
                    + rounded_delta
                )
                off = _of_seen(off, seen)
                spread[0][b, h, start:stop] = abs(scale) * _product(off, keys.abs(), seen)
                spread[1][b, g] += abs(scale) * _product(off.T, queries.abs(), seen_by)
                off = _of_seen((unit + relative) * weights, seen)
                spread[2][b, g] += _product(off.T, outer.abs(), seen_by)
                on_chunk()
    smallest = torch.finfo(query.dtype).smallest_normal * unit * 2
    limits = [
        FACTOR * (wide + unit * value.abs()) + smallest for wide, value in zip(spread, exact, strict=True)
    ]
    return Exact(packed(exact), packed(limits))


def _of_seen(numbers: Tensor, seen: Tensor | None) -> Tensor:
    """Zero where nothing is seen; ``None``: nothing is hidden that is not zero already."""
    return numbers if seen is None else torch.where(seen, numbers, 0.0)


def _product(numbers: Tensor, rows: Tensor, seen: Tensor | None) -> Tensor:
    """``numbers @ rows``, without products of what is hidden, which 0 x NaN would spoil."""
    if seen is None:
        return numbers @ rows
    strange = ~rows.isfinite().all(-1)
    result = numbers.masked_fill(strange, 0.0) @ rows.masked_fill(strange[:, None], 0.0)
    for index in strange.nonzero()[:, 0].tolist():
        result += torch.where(seen[:, index, None], numbers[:, index, None] * rows[index], 0.0)
    return result
