"""Gradients of attention by their definition, in float64; how far a kernel's may be from them, element by element; and
what PyTorch makes of the same input in its own dtype. For kernels of any device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from attention_reference import visible_keys

from computed_once import computed_once
from flashmoe_science.gradients import Gradients, Needs

UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
# Products of bf16 pairs take operands and sums below the smallest normal number as zero (VDPBF16PS, on x86).
FLUSHED = {torch.bfloat16: 2.0**-126}
# Half the distance of the numbers next to zero.
UNDERFLOW = {torch.float64: 0.0, torch.float32: 2.0**-127, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-127}
SAFETY = 1.5
NAMES = ("query", "key", "value")


@dataclass(frozen=True)
class Case:
    """The arguments of one backward pass."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_output: torch.Tensor
    grad_lse: torch.Tensor | None = None
    causal: bool = False
    softmax_scale: float | None = None

    @property
    def scale(self) -> float:
        return self.query.shape[3] ** -0.5 if self.softmax_scale is None else float(self.softmax_scale)

    @property
    def group(self) -> int:
        return self.query.shape[1] // max(1, self.key.shape[1])


class Exact(NamedTuple):
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Of query, key and value, float64."""
    bounds: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """What the error of each element may be."""


def random_case(
    batch: int,
    heads: int,
    kv_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    grad_lse: bool = False,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, seqlen: int) -> torch.Tensor:
        return torch.randn(batch, heads, seqlen, head_dim, generator=generator, dtype=torch.float32).to(dtype)

    return Case(
        query=normal(heads, seqlen_q),
        key=normal(kv_heads, seqlen_k),
        value=normal(kv_heads, seqlen_k),
        grad_output=normal(heads, seqlen_q),
        grad_lse=torch.randn(batch, heads, seqlen_q, generator=generator, dtype=torch.float32)
        if grad_lse
        else None,
        causal=causal,
        softmax_scale=softmax_scale,
    )


def exact_gradients(case: Case, output: torch.Tensor, lse: torch.Tensor) -> Exact:
    """The gradients, and the bound that a backward pass keeps which is given this output and log-sum-exp.

    With u the unit roundoff of the tensors' type, P and dS the weights and the gradients of the scores, and errors of
    fp32 arithmetic as they are typical of blocked sums:

    * P is off by the exponential's error and those of the score and of the log-sum-exp it is given;
    * dV: P is rounded once, summed in fp32, and the result rounded once;
    * dS: rounded once; besides the errors of P, of dP = dO V^T, and of Δ, which is made from the output it is given;
    * dQ and dK: dS summed in fp32, the result rounded once.

    Every term is a sum of magnitudes over the row or column concerned, so that a small row gets a small bound.
    """
    dtype = case.query.dtype
    u = UNIT_ROUNDOFF[dtype]
    query, key, value, grad_output = (
        tensor.double() for tensor in (case.query, case.key, case.value, case.grad_output)
    )
    key, value = (tensor.repeat_interleave(case.group, 1) for tensor in (key, value))
    visible = visible_keys(query.shape[2], key.shape[2], case.causal).to(query.device)
    scores = (query @ key.mT * case.scale).masked_fill(~visible, -math.inf)
    exact_lse = scores.logsumexp(-1)
    has_keys = visible.any(-1)
    weights = (scores - exact_lse.masked_fill(~has_keys, 0)[..., None]).exp().masked_fill(~visible, 0)
    exact_output = weights @ value
    grad_weights = grad_output @ value.mT
    delta = (exact_output * grad_output).sum(-1)
    if case.grad_lse is not None:
        delta = delta - case.grad_lse.double()
    grad_scores = (weights * (grad_weights - delta[..., None])).masked_fill(~visible, 0)

    def over_group(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(1, (-1, case.group)).sum(2)

    gradients = (
        case.scale * grad_scores @ key,
        case.scale * over_group(grad_scores.mT @ query),
        over_group(weights.mT @ grad_output),
    )

    seqlen_q, seqlen_k, head_dim = query.shape[2], key.shape[2], query.shape[3]
    float32 = 2.0**-24 if dtype != torch.float64 else 2.0**-53
    magnitude = abs(case.scale) * (query.abs() @ key.abs().mT)
    lse_error = (lse.double() - exact_lse).abs().masked_fill(~has_keys, 0)
    finite_lse = exact_lse.abs().masked_fill(~has_keys, 0)
    # 2^-13: an exponential of degree 3, good enough where weights are rounded to bf16 next.
    exponential = 2.0**-13 if dtype == torch.bfloat16 else 2.0**-22
    of_weights = (
        exponential
        + float32 * (_typical(head_dim) * magnitude + finite_lse[..., None])
        + lse_error[..., None]
    )
    of_delta = ((output.double() - exact_output).abs() * grad_output.abs()).sum(-1)
    of_delta = of_delta + float32 * _typical(head_dim) * (exact_output * grad_output).abs().sum(-1)
    of_scores = (
        u * grad_scores.abs()
        + weights
        * (of_weights + float32 * _typical(head_dim))
        * (grad_output.abs() @ value.abs().mT + delta.abs()[..., None])
        + weights * of_delta[..., None]
    )
    flushed = FLUSHED.get(dtype, 0.0)
    of_scores = (of_scores + flushed * (1 + grad_weights.abs() + delta.abs()[..., None])).masked_fill(
        ~visible, 0
    )
    over_keys = float32 * _typical(seqlen_k)
    over_queries = float32 * _typical(seqlen_q * case.group)
    sums = (
        abs(case.scale) * (of_scores + over_keys * grad_scores.abs()) @ key.abs(),
        abs(case.scale) * over_group((of_scores + over_queries * grad_scores.abs()).mT @ query.abs()),
        over_group(((u + of_weights + over_queries) * weights + flushed * visible).mT @ grad_output.abs()),
    )
    bounds = tuple(
        SAFETY * (bound + u * gradient.abs() + flushed) + UNDERFLOW[dtype]
        for bound, gradient in zip(sums, gradients, strict=True)
    )
    return Exact(gradients, (bounds[0], bounds[1], bounds[2]))


def _typical(terms: int) -> float:
    """Of the error of a sum of so many terms, in units in the last place of the sum of their magnitudes."""
    return math.sqrt(max(1, terms))


def worst_ratios(gradients: Gradients, exact: Exact) -> dict[str, float]:
    """For each gradient that there is: the largest error as a fraction of its bound, over all elements of all rows.

    Infinite where an element must be exact and is not, or is not a number.
    """
    worst = {}
    for name, gradient, expected, bound in zip(NAMES, gradients, *exact, strict=True):
        if gradient is None or not gradient.numel():
            continue
        error = (gradient.double() - expected).abs()
        ratio = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=math.inf)
        worst[name] = float(ratio.max())
    return worst


def assert_within_bounds(case: Case, output: torch.Tensor, lse: torch.Tensor, gradients: Gradients) -> None:
    """Each element of each gradient that is there, of the right shape and type, is as exact as it must be."""
    exact = exact_gradients(case, output, lse)
    for name, gradient, tensor in zip(NAMES, gradients, (case.query, case.key, case.value), strict=True):
        if gradient is not None:
            assert gradient.shape == tensor.shape, name
            assert gradient.dtype == tensor.dtype, name
    worst = worst_ratios(gradients, exact)
    assert all(ratio <= 1 for ratio in worst.values()), worst


@computed_once
@computed_once
def by_definition(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In float64, never multiplying by what is masked: NaN and infinities get where the definition says, no further."""
    query, key, value, grad_output = (
        each.double() for each in (case.query, case.key, case.value, case.grad_output)
    )
    grad_query, grad_key, grad_value = (torch.zeros_like(each) for each in (query, key, value))
    for row in range(query.shape[2]):
        keys = int(visible_keys(query.shape[2], key.shape[2], case.causal)[row].sum())
        if keys == 0:
            continue
        q, k, v = query[:, :, row, :, None], key[:, :, :keys], value[:, :, :keys]
        weights = (k @ q * case.scale).softmax(2)
        grad = grad_output[:, :, row, None]
        grad_weights = (v * grad).sum(-1, keepdim=True)
        delta = ((weights * v).sum(2, keepdim=True) * grad).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - delta)
        grad_query[:, :, row] = (grad_scores * k).sum(2) * case.scale
        grad_key[:, :, :keys] += grad_scores * query[:, :, row, None] * case.scale
        grad_value[:, :, :keys] += weights * grad
    return grad_query, grad_key, grad_value


def torch_gradients(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Those of PyTorch's SDPA in the dtype of the input. It has none of the log-sum-exp, and NaN for rows without keys,
    which are left out.
    """
    assert case.grad_lse is None
    query, key, value = (tensor.detach().requires_grad_() for tensor in (case.query, case.key, case.value))
    mask = visible_keys(query.shape[2], key.shape[2], case.causal).to(query.device)
    rows = mask.any(-1)
    out = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, rows],
        key.repeat_interleave(case.group, 1),
        value.repeat_interleave(case.group, 1),
        attn_mask=mask[rows] if case.causal else None,
        scale=case.scale,
    )
    grad_query, grad_key, grad_value = torch.autograd.grad(
        out, (query, key, value), case.grad_output[:, :, rows]
    )
    return grad_query, grad_key, grad_value


def assert_rms_as_of_torch(case: Case, gradients: Gradients, exact: Exact) -> None:
    """The RMS of the errors is at most 1.15 times that of PyTorch's gradients."""
    for ours, theirs, expected in zip(gradients, torch_gradients(case), exact.gradients, strict=True):
        assert ours is not None
        error, their_error = ((each.double() - expected).square().mean().sqrt() for each in (ours, theirs))
        assert error <= 1.15 * their_error


def assert_as_exact_as_torch(case: Case, gradients: Gradients, exact: Exact) -> None:
    """Error against float64 at most twice PyTorch's own: the worst element, and the RMS of the worst row."""
    for name, gradient, theirs, expected in zip(
        NAMES, gradients, torch_gradients(case), exact.gradients, strict=True
    ):
        if gradient is None or not gradient.numel():
            continue
        error, their_error = (gradient.double() - expected).abs(), (theirs.double() - expected).abs()
        ulp = torch.finfo(gradient.dtype).eps * expected.abs().max()
        assert error.max() <= 2 * their_error.max() + ulp, name
        rows, their_rows = (each.square().mean(-1).sqrt().max() for each in (error, their_error))
        assert rows <= 2 * their_rows + ulp / 2, name


class ReferenceBackend:
    """Attention by its definition as a backend: any dtype, computed in float64. For the layer above backends."""

    @staticmethod
    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        causal: bool,
        softmax_scale: float | None,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        case = Case(query, key, value, torch.zeros_like(query), None, causal, softmax_scale)
        weights, lse = _weights(case)
        output = weights @ value.double().repeat_interleave(case.group, 1)
        return output.to(query.dtype), lse.to(_lse_dtype(query)) if return_lse else None

    @staticmethod
    def backward(
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        grad_lse: torch.Tensor | None,
        *,
        causal: bool,
        softmax_scale: float | None,
        needs: Needs,
    ) -> Gradients:
        case = Case(query, key, value, grad_output, grad_lse, causal, softmax_scale)
        exact = exact_gradients(case, output, lse).gradients
        grad_query, grad_key, grad_value = (
            gradient.to(query.dtype) if needed else None
            for gradient, needed in zip(exact, needs, strict=True)
        )
        return grad_query, grad_key, grad_value


def _lse_dtype(query: torch.Tensor) -> torch.dtype:
    """float64 for float64, for derivatives by differences."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _weights(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    visible = visible_keys(case.query.shape[2], case.key.shape[2], case.causal).to(case.query.device)
    key = case.key.double().repeat_interleave(case.group, 1)
    scores = (case.query.double() @ key.mT * case.scale).masked_fill(~visible, -math.inf)
    return scores.softmax(-1).masked_fill(~visible, 0), scores.logsumexp(-1)


def scaled(case: Case, factor: float) -> Case:
    """The same with grad_output times a power of two."""
    return replace(case, grad_output=case.grad_output * factor)
