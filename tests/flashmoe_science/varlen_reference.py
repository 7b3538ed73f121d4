"""Attention over sequences of any lengths by its definition, in float64 and in what kernels compute with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from computed_once import computed_once


class Sequence(NamedTuple):
    """One sequence of a call, on the CPU."""

    first_row: int
    query: torch.Tensor
    """(queries, heads, head_dim)."""
    key: torch.Tensor
    """(keys, kv_heads, head_dim), gathered from where they lie."""
    value: torch.Tensor
    slopes: torch.Tensor | None
    """(heads,)."""


def sequences(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> Iterator[Sequence]:
    query, key, value = query.cpu(), key.cpu(), value.cpu()
    rows = cu_seqlens_q.tolist()
    used = None if seqused_k is None else seqused_k.tolist()
    for index, (first, end) in enumerate(itertools.pairwise(rows)):
        if block_table is None:
            assert cu_seqlens_k is not None
            start, stop = cu_seqlens_k[index : index + 2].tolist()
            at = torch.arange(start, stop if used is None else start + used[index])
            keys, values = key[at], value[at]
        else:
            assert used is not None
            position = torch.arange(used[index])
            page = block_table[index].cpu().long()[position // key.shape[1]]
            keys, values = (tensor[page, position % key.shape[1]] for tensor in (key, value))
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[index]
        yield Sequence(first, query[first:end], keys, values, None if slopes is None else slopes.cpu())


def visible_keys(
    queries: int, keys: int, causal: bool, window: tuple[int, int], chunk: int = 0
) -> torch.Tensor:
    """(queries, keys) booleans."""
    position = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    visible = torch.ones(queries, keys, dtype=torch.bool)
    left, right = window[0], 0 if causal else window[1]
    if left >= 0:
        visible &= key >= position - left
    if right >= 0:
        visible &= key <= position + right
    if chunk:
        visible &= key.div(chunk, rounding_mode="floor") == position.div(chunk, rounding_mode="floor")
    return visible


def tree_keys(words: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """(queries, keys) booleans: what a tree's words, one for each query, leave of the keys."""
    sees = torch.ones(queries, keys, dtype=torch.bool)
    for node in range(queries):
        if keys - queries + node >= 0:
            sees[:, keys - queries + node] = (words >> node & 1).bool()
    return sees


def scores_of(
    sequence: Sequence, softmax_scale: float | None, softcap: float, dtype: torch.dtype
) -> torch.Tensor:
    """(heads, queries, keys), with cap and slopes, without masks."""
    queries, heads, head_dim = sequence.query.shape
    keys, kv_heads, _ = sequence.key.shape
    query = sequence.query.to(dtype).view(queries, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("qkgd,jkd->kgqj", query, sequence.key.to(dtype)).reshape(heads, queries, keys)
    scores = scores * (head_dim**-0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if sequence.slopes is not None:
        position = torch.arange(queries)[:, None] + keys - queries
        distance = (position - torch.arange(keys)).abs().to(dtype)
        scores = scores - sequence.slopes.to(dtype)[:, None, None] * distance
    return scores


def _weigh(
    sequence: Sequence,
    scores: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor | None,
    dtype: torch.dtype,
    rounded_to: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (queries, heads, value_dim) and log-sum-exp (queries, heads), of keys that are visible alone."""
    heads, queries, _ = scores.shape
    group = heads // sequence.value.shape[1]
    value = sequence.value.to(dtype).repeat_interleave(group, 1)
    out = torch.zeros(queries, heads, value.shape[2], dtype=dtype)
    lse = torch.full((queries, heads), -math.inf, dtype=dtype)
    # Hidden keys take no part at all, so that NaN and infinities spread exactly where the definition says.
    together = bool(value.isfinite().all())
    for rows in [slice(0, queries)] if together else [slice(row, row + 1) for row in range(queries)]:
        seen = visible[rows].any(0)
        if not seen.any():
            continue
        hidden = ~visible[rows][:, seen]
        part = scores[:, rows][..., seen].masked_fill(hidden, -math.inf)
        with_sink = part
        if sinks is not None:
            logits = sinks.cpu().to(dtype)[:, None, None].expand(heads, part.shape[1], 1)
            with_sink = torch.cat([part, logits], -1)
        weights = with_sink.softmax(-1)[..., : part.shape[2]].masked_fill(hidden, 0).to(rounded_to).to(dtype)
        out[rows] = torch.einsum("hqj,jhd->qhd", weights, value[seen])
        lse[rows] = part.logsumexp(-1).T
    out[~visible.any(1)] = 0
    return out, lse


@computed_once
def exact_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    split_keys: int | None = None,
    chunk: int = 0,
    tree_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    rounded_to: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `flashmoe_science.attention_varlen` computes: output and log-sum-exp, on the CPU, in ``dtype``.

    The bounds and ``split_keys`` change nothing of it. ``rounded_to``: what weights are rounded to before they are
    multiplied with values, as kernels do.
    """
    out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=dtype)
    lse = torch.full(query.shape[:2], -math.inf, dtype=dtype)
    for sequence in sequences(
        query, key, value, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, alibi_slopes
    ):
        queries, keys = sequence.query.shape[0], sequence.key.shape[0]
        visible = visible_keys(queries, keys, causal, window, chunk)
        scores = scores_of(sequence, softmax_scale, softcap, dtype)
        rows = slice(sequence.first_row, sequence.first_row + queries)
        if tree_mask is not None and queries <= 64:
            visible &= tree_keys(tree_mask[rows], queries, keys)
        out[rows], lse[rows] = _weigh(sequence, scores, visible, sinks, dtype, rounded_to)
    return out, lse


def assert_as_exact_as_pytorch(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    call: dict[str, torch.Tensor],
    lse_atol: float = 2e-5,
    **options: object,
) -> None:
    """Error against float64 at most twice that of the definition in float32 with weights in the inputs' dtype (worst
    element and RMS), plus a few ulp; the log-sum-exp to float32's precision. ``call`` and ``options`` are what
    `attention_varlen` was called with.
    """
    query, value = call["query"], call["value"]
    exact, exact_lse = exact_varlen(**call, **options)  # type: ignore[arg-type]
    plain, _ = exact_varlen(**call, **options, dtype=torch.float32, rounded_to=query.dtype)  # type: ignore[arg-type]
    assert out.shape == exact.shape
    assert out.dtype == query.dtype
    ours = out.cpu().double()
    assert torch.equal(ours.isnan(), exact.isnan())
    finite = exact.isfinite()
    largest = value[value.isfinite()].abs().max().double().cpu() if value.isfinite().any() else 0.0
    ulp = torch.finfo(query.dtype).eps * largest
    error = (ours - exact)[finite].abs()
    their_error = (plain.to(query.dtype).double() - exact)[finite].abs()
    if error.numel():
        assert error.max() <= 2 * their_error.max() + 4 * ulp
        assert error.square().mean().sqrt() <= 2 * their_error.square().mean().sqrt() + ulp
    if lse is not None:
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=2e-6, atol=lse_atol, equal_nan=True)
