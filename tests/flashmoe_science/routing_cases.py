"""Routings with losses, and what they and their gradients must be, in float64."""

from __future__ import annotations

import torch
from topk_reference import reference

from flashmoe_science.moe_arguments import Scores
from flashmoe_science.routing_options import RoutingOptions

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CASES = {
    "few experts": (70, 8, 2, BF16, RoutingOptions()),
    "fewer than lanes": (37, 5, 5, FP32, RoutingOptions(Scores.SIGMOID, renormalize=False)),
    "half precision": (40, 100, 8, FP16, RoutingOptions(renormalize=False, scaling_factor=2.5)),
    "deepseek": (33, 64, 8, FP32, RoutingOptions(Scores.SIGMOID, scaling_factor=2.5, groups=8, top_groups=4)),
    "more than lanes": (9, 64, 40, FP32, RoutingOptions(scaling_factor=0.5)),
    "all experts": (3, 1024, 6, BF16, RoutingOptions(Scores.SIGMOID)),
}


def exact(
    logits: torch.Tensor, k: int, options: RoutingOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of float64 logits: weights, ids, both losses and the counts."""
    weights, ids = reference(
        logits,
        *(k, options.scores, options.renormalize, None, options.scaling_factor),
        groups=options.groups,
        top_groups=options.top_groups,
    )
    tokens, experts = logits.shape
    counts = torch.zeros(experts, dtype=torch.int64).index_add_(
        0, ids.flatten(), torch.ones(ids.numel(), dtype=torch.int64)
    )
    balance = experts * (counts / tokens * logits.softmax(-1).mean(0)).sum()
    return weights, ids, balance, logits.logsumexp(-1).square().mean(), counts


def logits_of(tokens: int, experts: int, dtype: torch.dtype) -> torch.Tensor:
    return (2 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts))).to(dtype)


Given = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Gradients of the weights and of both losses."""


def incoming(
    logits: torch.Tensor, k: int, options: RoutingOptions, which: tuple[bool, bool, bool]
) -> tuple[Given, torch.Tensor, float]:
    """Random ones, None where ``which`` says so; what they make the gradient of the logits; and the difference that
    float32 allows near zero.
    """
    tokens, experts = logits.shape
    wide = logits.double().requires_grad_()
    weights, _, balance, z, counts = exact(wide, k, options)
    generator = torch.Generator().manual_seed(3)
    grads = [torch.randn(shape, generator=generator) for shape in ((tokens, k), (), ())]
    outputs = [
        (output * grad.double()).sum()
        for output, grad, there in zip((weights, balance, z), grads, which, strict=True)
        if there
    ]
    (right,) = torch.autograd.grad(sum(outputs), wide)
    # What is subtracted from one another for the first loss may be larger than what is left.
    parts = float(grads[1].abs()) * experts * int(counts.max()) / tokens**2 if which[1] else 0.0
    smallest = 6e-8 if logits.dtype is FP16 else 0.0
    least = 1e-6 * max(float(right.abs().max()), 2 * parts) + smallest
    of_weights, of_balance, of_z = (grad if there else None for grad, there in zip(grads, which, strict=True))
    return (of_weights, of_balance, of_z), right, least
