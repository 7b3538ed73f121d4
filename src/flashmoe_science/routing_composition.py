"""A router's choice in PyTorch's operations: what its kernels are compared with, on any device."""

from __future__ import annotations

import torch

from flashmoe_science.arguments import reject_without_memory
from flashmoe_science.moe_arguments import RENORMALIZE_FLOOR, Scores, check_topk_arguments


def topk(
    logits: torch.Tensor,
    k: int,
    *,
    scores: Scores = Scores.SOFTMAX,
    renormalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    scaling_factor: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flashmoe_science.topk_routing` in PyTorch's operations, on any device; arguments and results as there."""
    check_topk_arguments(logits, k, renormalize, correction_bias, scaling_factor, groups, top_groups)
    reject_without_memory(logits=logits)
    exact = logits.float()
    score = exact.softmax(dim=-1) if scores is Scores.SOFTMAX else exact.sigmoid()
    rank = exact if correction_bias is None else score + correction_bias
    if groups == 1:
        ids = _largest(rank, k)
    else:
        candidates = _experts_of_best_groups(rank, groups, top_groups, 1 if correction_bias is None else 2)
        ids = candidates.gather(1, _largest(rank.gather(1, candidates), k))
    weights = score.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + RENORMALIZE_FLOOR)
    return weights * scaling_factor, ids.to(torch.int32)


def _experts_of_best_groups(rank: torch.Tensor, groups: int, top_groups: int, summed: int) -> torch.Tensor:
    """The experts, ascending, of each row's best groups. A group has the sum of its ``summed`` best ranks."""
    size = rank.shape[1] // groups
    each = rank.view(-1, size)
    best = each.gather(1, _largest(each, min(summed, size))).sum(dim=1)
    chosen = _largest(best.view(-1, groups), top_groups).sort(dim=1).values
    of_group = torch.arange(size, dtype=chosen.dtype, device=rank.device)
    return (chosen.unsqueeze(2) * size + of_group).flatten(1)


def _largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Places of the k largest of each row, the larger first, then the lower place; NaN is below every number."""
    unknown = values.isnan()
    order = torch.sort(values.masked_fill(unknown, -torch.inf), dim=-1, descending=True, stable=True).indices
    if bool(unknown.any()):
        last = torch.sort(unknown.gather(1, order).to(torch.int8), dim=-1, stable=True).indices
        order = order.gather(1, last)
    return order[:, :k]
