"""Losses that keep a router balanced and its logits small: in PyTorch's operations, or with the choice in one pass."""

from __future__ import annotations

import os
from typing import Any, Literal, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from flashmoe_science.arguments import check_dense
from flashmoe_science.cpu import routing as cpu_fused
from flashmoe_science.cuda.moe import routing_losses as cuda_fused
from flashmoe_science.direct import all_direct
from flashmoe_science.errors import InputError
from flashmoe_science.moe import topk_routing
from flashmoe_science.moe_arguments import Scores, parse_choice
from flashmoe_science.moe_capacity import tokens_per_expert
from flashmoe_science.routing_gradients import logits_gradient
from flashmoe_science.routing_options import RoutingOptions
from flashmoe_science.torch_private import is_batched

OVERRIDE_VARIABLE = "FLASHMOE_ROUTING_LOSSES"
_COMPOSED = "composed"


class RoutingLosses(NamedTuple):
    """Both float32 scalars, differentiable by the logits; to be added to a model's loss, each times a small factor."""

    load_balancing: torch.Tensor
    """experts * sum over experts of (slots of the expert / tokens) * (its mean probability); k where all are alike."""
    z: torch.Tensor
    """The mean of the squared logarithm of the softmax's denominator."""
    tokens_per_expert: torch.Tensor
    """(experts,) int64, how many slots chose each; not differentiable."""


def routing_losses(logits: torch.Tensor, topk_ids: torch.Tensor) -> RoutingLosses:
    """The losses of a routing.

    Args:
        logits: (tokens, experts), the router's; computed with in float32.
        topk_ids: (tokens, k), the chosen experts; ids that are no experts count nowhere.

    Probabilities are the softmax of the logits, also where experts are chosen by sigmoids. Without tokens both losses
    are 0.

    Reference: Fedus et al., Switch transformers (2021), arXiv:2101.03961, for the first, summed over choices as
    transformers does; Zoph et al., ST-MoE (2022), arXiv:2202.08906, for the second.
    """
    if not is_dynamo_compiling():
        check_dense(logits=logits, topk_ids=topk_ids)
        if logits.dim() != 2 or not logits.is_floating_point():
            raise InputError(
                f"logits is {logits.dtype} with shape {tuple(logits.shape)}; expected floats, (tokens, experts)"
            )
        if topk_ids.shape[:1] != logits.shape[:1]:
            raise InputError(
                f"topk_ids has shape {tuple(topk_ids.shape)} and logits {tuple(logits.shape)}; "
                "expected the same number of tokens"
            )
    tokens, experts = logits.shape
    exact = logits.float()
    counts = tokens_per_expert(topk_ids, experts)
    share = counts.float() / max(tokens, 1)
    mean_probability = exact.softmax(dim=-1).sum(dim=0) / max(tokens, 1)
    balance = experts * (share * mean_probability).sum()
    z = exact.logsumexp(dim=-1).square().sum() / max(tokens, 1)
    return RoutingLosses(balance, z, counts)


def topk_routing_with_losses(
    logits: torch.Tensor,
    k: int,
    *,
    scores: Literal["softmax", "sigmoid"] = "softmax",
    renormalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    scaling_factor: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, RoutingLosses]:
    """`topk_routing` and the `routing_losses` of its choice: arguments, results, gradients and errors as there.

    Eager calls read the logits once for all of it, and once more for the gradient. On CUDA that is so from sm_80 on,
    and ``FLASHMOE_ROUTING_LOSSES=composed`` in the environment has the losses made of PyTorch's operations instead.
    """
    fused = _fused(logits, correction_bias)
    if fused is not None:
        kind = parse_choice(Scores, scores, "scores")
        options = RoutingOptions(kind, renormalize, scaling_factor, groups, top_groups)
        return _routed(fused, logits, k, options, correction_bias)
    weights, ids = topk_routing(
        logits,
        k,
        scores=scores,
        renormalize=renormalize,
        correction_bias=correction_bias,
        scaling_factor=scaling_factor,
        groups=groups,
        top_groups=top_groups,
    )
    return weights, ids, routing_losses(logits, ids)


def losses_gradient(
    logits: torch.Tensor,
    counts: torch.Tensor,
    grad_balance: torch.Tensor | None,
    grad_z: torch.Tensor | None,
) -> torch.Tensor:
    """(tokens, experts) float32: of both losses by the logits, in operations that can be differentiated again."""
    tokens, experts = logits.shape
    exact = logits.float()
    probability = exact.softmax(dim=-1)
    gradient = torch.zeros_like(exact)
    if grad_balance is not None:
        share = grad_balance * experts / tokens**2 * counts
        gradient = probability * (share - (probability * share).sum(dim=-1, keepdim=True))
    if grad_z is not None:
        gradient = gradient + probability * (2 * grad_z / tokens * exact.logsumexp(dim=-1, keepdim=True))
    return gradient


def _fused(logits: torch.Tensor, correction_bias: torch.Tensor | None) -> Any:
    """The kernels that make choice and losses in one pass, where they can be called. On CUDA they can be declined."""
    if is_dynamo_compiling() or not all_direct(logits, correction_bias):
        return None
    if not isinstance(logits, torch.Tensor) or logits.is_nested or logits.dim() != 2 or logits.shape[0] == 0:
        return None
    if logits.is_cpu:
        return cpu_fused
    if not logits.is_cuda or os.environ.get(OVERRIDE_VARIABLE) == _COMPOSED:
        return None
    return cuda_fused if cuda_fused.takes(logits) else None


def _routed(
    fused: Any, logits: torch.Tensor, k: int, options: RoutingOptions, correction_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, RoutingLosses]:
    if logits.requires_grad and torch.is_grad_enabled():
        weights, ids, balance, z, counts = _Routed.apply(fused, logits, k, options, correction_bias)  # type: ignore[no-untyped-call]
    else:
        weights, ids, balance, z, counts = fused.forward(logits, k, options, correction_bias)
    return weights, ids, RoutingLosses(balance, z, counts)


class _Routed(torch.autograd.Function):
    """Keeps the logits, the choice and how often each expert was chosen."""

    @staticmethod
    def forward(
        ctx: Any,
        fused: Any,
        logits: torch.Tensor,
        k: int,
        options: RoutingOptions,
        correction_bias: torch.Tensor | None,
    ) -> Any:
        results = fused.forward(logits, k, options, correction_bias)
        ctx.fused, ctx.options = fused, options
        ctx.save_for_backward(logits, results.ids, results.counts)
        ctx.mark_non_differentiable(results.ids, results.counts)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(
        ctx: Any,
        grad_weights: torch.Tensor | None,
        grad_ids: None,
        grad_balance: torch.Tensor | None,
        grad_z: torch.Tensor | None,
        grad_counts: None,
    ) -> Any:
        # Tensors that hooks saved and restored need not have the forward's strides.
        logits, ids, counts = (tensor.contiguous() for tensor in ctx.saved_tensors)
        given = grad_weights, grad_balance, grad_z
        if all(each is None for each in given):
            return (None,) * 5
        options: RoutingOptions = ctx.options
        if not torch.is_grad_enabled() and not any(each is not None and is_batched(each) for each in given):
            dense = (None if each is None else each.contiguous() for each in given)
            return None, ctx.fused.backward(logits, ids, counts, *dense, options), None, None, None
        # A graph of the gradient is asked for, or several: in operations that can be differentiated and mapped.
        gradient = losses_gradient(logits, counts, grad_balance, grad_z)
        if grad_weights is not None:
            gradient = gradient + logits_gradient(
                grad_weights,
                logits.float(),
                ids,
                scores=options.scores,
                renormalize=options.renormalize,
                scaling_factor=options.scaling_factor,
            )
        return None, gradient.to(logits.dtype), None, None, None
