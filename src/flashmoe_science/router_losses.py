"""Losses that keep a router balanced and its logits small, in PyTorch's operations."""

from __future__ import annotations

from typing import NamedTuple

import torch


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

    Without tokens both losses are 0.

    Reference: Fedus et al., Switch transformers (2021), arXiv:2101.03961, for the first, summed over choices as
    transformers does; Zoph et al., ST-MoE (2022), arXiv:2202.08906, for the second.
    """
    tokens, experts = logits.shape
    exact = logits.float()
    counts = (
        topk_ids.unsqueeze(-1) == torch.arange(experts, dtype=topk_ids.dtype, device=topk_ids.device)
    ).sum(dim=(0, 1))
    share = counts.float() / max(tokens, 1)
    mean_probability = exact.softmax(dim=-1).sum(dim=0) / max(tokens, 1)
    balance = experts * (share * mean_probability).sum()
    z = exact.logsumexp(dim=-1).square().sum() / max(tokens, 1)
    return RoutingLosses(balance, z, counts)
