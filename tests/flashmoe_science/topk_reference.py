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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float64 and ids int64, (tokens, k)."""
    exact = logits.double()
    values = exact.softmax(1) if scores is Scores.SOFTMAX else exact.sigmoid()
    ids = ranked(exact if bias is None else values + bias.double())[:, :k]
    weights = values.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + RENORMALIZE_FLOOR)
    return weights * scale, ids
