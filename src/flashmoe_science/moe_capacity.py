"""How many slots chose each expert, and a limit to it."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from flashmoe_science.arguments import check_dense
from flashmoe_science.errors import InputError

_MOST = 1 << 30


def tokens_per_expert(topk_ids: torch.Tensor, experts: int) -> torch.Tensor:
    """(experts,) int64, on the ids' device: how many slots chose each. Nothing is synchronised.

    Args:
        topk_ids: (tokens, k), int32 or int64; ids that are no experts count nowhere.
    """
    _check(topk_ids, experts=experts)
    every = torch.arange(experts, dtype=topk_ids.dtype, device=topk_ids.device)
    counts: torch.Tensor = (topk_ids.unsqueeze(-1) == every).sum(dim=(0, 1))
    return counts


def limit_to_capacity(topk_ids: torch.Tensor, experts: int, capacity: int) -> torch.Tensor:
    """The ids with -1 in the place of those for which their expert has no room. Nothing is synchronised.

    An expert takes its first ``capacity`` slots: those of earlier tokens, and of a token its earlier choices.

    Args:
        topk_ids: (tokens, k), int32 or int64; ids that are no experts stay as they are.
        experts: how many there are.
        capacity: slots that each of them takes, 0 or more.

    Reference: Fedus et al., Switch transformers (2021), arXiv:2101.03961.
    """
    _check(topk_ids, experts=experts, capacity=capacity)
    flat = topk_ids.flatten()
    keys = torch.where((flat >= 0) & (flat < experts), flat, experts)
    ordered, order = torch.sort(keys, stable=True)
    first = torch.searchsorted(ordered, ordered)
    index = torch.arange(keys.shape[0], dtype=first.dtype, device=keys.device) - first
    dropped = torch.zeros_like(keys, dtype=torch.bool)
    dropped[order] = (index >= capacity) & (ordered < experts)
    return torch.where(dropped, -1, flat).view(topk_ids.shape)


def _check(topk_ids: torch.Tensor, **counts: int) -> None:
    if is_dynamo_compiling():
        return
    check_dense(topk_ids=topk_ids)
    if topk_ids.dtype not in (torch.int32, torch.int64) or topk_ids.dim() != 2:
        raise InputError(
            f"topk_ids is {topk_ids.dtype} with shape {tuple(topk_ids.shape)}; expected int32 or int64, (tokens, k)"
        )
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int | torch.SymInt) or not 0 <= count <= _MOST:
            raise InputError(f"{name} is {count!r:.80}; expected 0 or more, a whole number")
