"""Trees of draft tokens as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from cudadent42.operations.attention_varlen.case import VarlenCase


def tree_mask(case: VarlenCase, device: str) -> Tensor | None:
    """(tokens,) int64, as `flashmoe_science.attention_varlen` takes it; None for a case without trees."""
    if not case.tree:
        return None
    words: list[int] = []
    for index, queries in enumerate(case.seqlens_q):
        words += case.words(index) or [0] * queries
    signed = [word - (word >> 63 << 64) for word in words]
    return torch.tensor(signed, dtype=torch.int64, device=device)


def hidden_by_tree(words: Tensor, queries: int, keys: int) -> Tensor:
    """(rows, keys) booleans: what these rows of a sequence do not see of the keys of its queries, its last ones."""
    hidden = torch.zeros(len(words), keys, dtype=torch.bool, device=words.device)
    nodes = torch.arange(max(0, queries - keys), queries, dtype=torch.int64, device=words.device)
    hidden[:, keys - len(nodes) :] = (words[:, None] >> nodes & 1) == 0
    return hidden
