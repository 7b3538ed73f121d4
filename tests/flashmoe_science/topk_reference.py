"""What `topk_routing` must return, in float64."""

from __future__ import annotations

import torch

from flashmoe_science.moe_arguments import RENORMALIZE_FLOOR, Scores


def ranked(rank: torch.Tensor) -> torch.Tensor:
    """Columns of each row, the best first: equal ones by column, NaN last."""
    order = rank.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argsort(
        dim=1, descending=True, stable=True
    )
    nan_last = rank.isnan().gather(1, order).int().argsort(dim=1, stable=True)
    return order.gather(1, nan_last)


def reference(
    logits: torch.Tensor,
    k: int,
    scores: Scores,
    renormalize: bool,
    bias: torch.Tensor | None,
    scale: float,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float64 and ids int64, (tokens, k)."""
    exact = logits.double()
    values = exact.softmax(1) if scores is Scores.SOFTMAX else exact.sigmoid()
    rank = exact if bias is None else values + bias.double()
    order = ranked(rank)
    if groups > 1:
        size = rank.shape[1] // groups
        each = rank.view(len(rank), groups, size).nan_to_num(nan=-torch.inf)
        best = each.sort(dim=2, descending=True).values[..., : 1 if bias is None else 2].sum(dim=2)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, ranked(best)[:, :top_groups], True)
        outside = ~kept.repeat_interleave(size, dim=1).gather(1, order)
        order = order.gather(1, outside.int().argsort(dim=1, stable=True))
    ids = order[:, :k]
    weights = values.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + RENORMALIZE_FLOOR)
    return weights * scale, ids
