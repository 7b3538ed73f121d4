"""The gradients of attention by their definition, in float64, and how far a 16-bit kernel may be from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Backward:
    """Inputs of a backward pass, the forward's results rounded as a kernel returns them, and what is right."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_output: torch.Tensor
    grad_lse: torch.Tensor | None
    causal: bool
    scale: float
    output: torch.Tensor
    lse: torch.Tensor
    exact: Three
    """Of query, key and value, float64."""
    bounds: Three
    """What each element may differ from it by."""
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0


def visible_keys(
    seqlen_q: int, seqlen_k: int, causal: bool, device: torch.device, window: tuple[int, int] = (-1, -1)
) -> torch.Tensor:
    """(seqlen_q, seqlen_k) booleans: causal masks and windows align bottom-right."""
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    left, right = window[0], 0 if causal else window[1]
    if right >= 0:
        mask = mask.tril(seqlen_k - seqlen_q + right)
    return mask.triu(seqlen_k - seqlen_q - left) if left >= 0 else mask


def backward_case(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_output: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    grad_lse: torch.Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Backward:
    """What a kernel gets and owes for finite inputs.

    The bound follows how often each product is rounded: with u half the distance of two numbers around 1, weights P are
    rounded once, dS once and the results once; delta is a sum of the output's rounded elements; sums are float32.
    """
    group = query.shape[1] // key.shape[1]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    q, k, v, do = (tensor.double() for tensor in (query, key, value, grad_output))
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    visible = visible_keys(query.shape[2], key.shape[2], causal, query.device, window)
    sees = visible.any(-1)[:, None]
    scores = q @ k.mT * scale
    slope = torch.ones_like(scores)
    if softcap:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent * bent
    scores = scores.masked_fill(~visible, -math.inf).masked_fill(~sees, 0)
    lse = scores.logsumexp(-1).masked_fill(~sees[:, 0], -math.inf)
    weights = scores.softmax(-1).masked_fill(~visible, 0)
    output = weights @ v
    dp = do @ v.mT
    of_lse = 0 if grad_lse is None else grad_lse.double()[..., None]
    delta = (output * do).sum(-1, keepdim=True) - of_lse
    ds = weights * (dp - delta) * slope

    u = torch.finfo(query.dtype).eps / 2
    tiny = torch.finfo(query.dtype).smallest_normal * u  # half a subnormal number
    largest = scores.masked_fill(weights == 0, 0).abs().amax() if scores.numel() else torch.zeros(())
    of_weights = 2e-5 + 2.0**-22 * largest
    error_of_delta = u * (output * do).abs().sum(-1, keepdim=True) + 1e-6 * delta.abs()
    error_of_dp = 2.0**-20 * (do.abs() @ v.abs().mT)
    error_of_slope = (1e-5 * weights * (dp - delta)).abs() if softcap else 0
    error = (
        u * ds.abs()
        + weights * (of_weights * (dp - delta).abs() + error_of_delta + error_of_dp) * slope
        + tiny
    )
    error = error + error_of_slope

    def over_group(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(1, (key.shape[1], group)).sum(2)

    exact = (scale * ds @ k, over_group(scale * ds.mT @ q), over_group(weights.mT @ do))
    summed = (
        abs(scale) * error @ k.abs(),
        over_group(abs(scale) * error.mT @ q.abs()),
        over_group(((u + of_weights) * weights + tiny).mT @ do.abs()),
    )
    # One and a half times what the terms add up to: their own products are left out.
    bounds = tuple(1.5 * (s + u * e.abs() + tiny) for s, e in zip(summed, exact, strict=True))
    return Backward(
        query=query,
        key=key,
        value=value,
        grad_output=grad_output,
        grad_lse=grad_lse,
        causal=causal,
        scale=scale,
        output=output.to(query.dtype),
        lse=lse.float().contiguous(),
        exact=exact,
        bounds=(bounds[0], bounds[1], bounds[2]),
        window=window,
        softcap=softcap,
    )


def assert_gradients(case: Backward, gradients: tuple[torch.Tensor | None, ...]) -> None:
    """Every element of every gradient that there is lies within its bound."""
    for name, got, exact, bound in zip(
        ("query", "key", "value"), gradients, case.exact, case.bounds, strict=True
    ):
        if got is None or got.numel() == 0:
            continue
        assert got.dtype == case.query.dtype
        assert got.shape == exact.shape
        assert got.isfinite().all(), f"gradient of {name} is not finite"
        ratio = ((got.double() - exact).abs() / bound).nan_to_num(0.0).max().item()
        assert ratio <= 1, f"gradient of {name}: {ratio:.2f} times its bound"
