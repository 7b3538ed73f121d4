"""The derivative of routing: from the gradient of the chosen experts' weights to that of the logits."""

from __future__ import annotations

import torch

from flashmoe_science.moe_arguments import RENORMALIZE_FLOOR, Scores


def logits_gradient(
    grad_weights: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    scores: Scores,
    renormalize: bool,
    scaling_factor: float,
) -> torch.Tensor:
    """In PyTorch's operations, each of which can be differentiated; the choice itself has no derivative.

    Let p be a token's scores and P the sum of the chosen ones (plus the floor). Where weights are divided by it, p_j
    takes (g_j - sum over i of g_i p_i / P) / P, g being the scaled gradients, else g_j. Logits take the derivative of
    the softmax or of the sigmoid of that.

    Args:
        grad_weights: (tokens, k) float32.
        logits: (tokens, experts), what was routed by.
        ids: (tokens, k), the choice, different ones in each row.

    Returns:
        (tokens, experts), like logits; float32 inside.
    """
    exact = torch.float64 if logits.dtype is torch.float64 else torch.float32
    given, chosen = logits.to(exact), ids.long()
    every = given.softmax(dim=-1) if scores is Scores.SOFTMAX else given.sigmoid()
    score = every.gather(1, chosen)
    grad = grad_weights.to(exact) * scaling_factor
    if renormalize:
        total = score.sum(dim=-1, keepdim=True) + RENORMALIZE_FLOOR
        grad = (grad - (grad * score).sum(dim=-1, keepdim=True) / total) / total
    if scores is Scores.SOFTMAX:
        through = (grad * score).sum(dim=-1, keepdim=True)
        result = torch.zeros_like(every).scatter(1, chosen, grad * score) - every * through
    else:
        result = torch.zeros_like(every).scatter(1, chosen, grad * score * (1 - score))
    return result.to(logits.dtype)
