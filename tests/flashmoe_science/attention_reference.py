"""Attention by its definition, in float64, and what PyTorch makes of the same input in its own dtype."""

from __future__ import annotations

import math

import torch

from computed_once import computed_once


def visible_keys(seqlen_q: int, seqlen_k: int, causal: bool) -> torch.Tensor:
    """(seqlen_q, seqlen_k) booleans: causal masks align bottom-right."""
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    return mask.tril(seqlen_k - seqlen_q) if causal else mask


@computed_once
def exact_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and natural log-sum-exp in float64.

    Masked keys take no part at all, so that NaN and infinities spread exactly where the definition says.
    """
    group = query.shape[1] // max(1, key.shape[1])
    query, key, value = query.double(), key.double(), value.double()
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scale = query.shape[3] ** -0.5 if scale is None else scale
    visible = visible_keys(query.shape[2], key.shape[2], causal)
    if all(tensor.isfinite().all() for tensor in (query, key, value)):
        scores = (query @ key.mT * scale).masked_fill(~visible, -math.inf)
        weights = scores.softmax(-1).masked_fill(~visible, 0)
        return weights @ value, scores.logsumexp(-1)
    out = torch.zeros_like(query)
    lse = torch.full(query.shape[:3], -math.inf, dtype=torch.float64)
    for row in range(query.shape[2]):
        keys = int(visible[row].sum())
        if keys:
            scores = (key[:, :, :keys] @ query[:, :, row, :, None])[..., 0] * scale
            lse[:, :, row] = scores.logsumexp(-1)
            out[:, :, row] = (scores.softmax(-1)[..., None, :] @ value[:, :, :keys])[..., 0, :]
    return out, lse


@computed_once
def torch_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None = None
) -> torch.Tensor:
    """PyTorch's SDPA in the dtype of the input; rows without keys are zero."""
    group = query.shape[1] // key.shape[1]
    mask = visible_keys(query.shape[2], key.shape[2], causal) if causal else None
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), attn_mask=mask, scale=scale
    )
    return out if mask is None else out.masked_fill(~mask.any(-1)[:, None], 0)


def assert_as_exact_as_torch(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float | None = None,
) -> None:
    """Error against float64 at most twice PyTorch's own, worst element and RMS, plus a few ulp."""
    exact, _ = exact_attention(query, key, value, causal, scale)
    assert out.shape == query.shape
    assert out.dtype == query.dtype
    if exact.numel() == 0 or value.numel() == 0:
        assert (out == 0).all()
        return
    theirs = torch_attention(query, key, value, causal, scale)
    ulp = torch.finfo(query.dtype).eps * value.abs().max().double()
    error, their_error = (out.double() - exact).abs(), (theirs.double() - exact).abs()
    assert error.isfinite().all()
    assert error.max() <= 2 * their_error.max() + 4 * ulp
    assert error.square().mean().sqrt() <= 2 * their_error.square().mean().sqrt() + ulp
