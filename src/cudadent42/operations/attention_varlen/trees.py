"""Trees of draft tokens, drawn from a case alone: which nodes lie on the way from a tree's root to each."""

from __future__ import annotations

from random import Random

TREES = ("chain", "star", "random")
"""One branch, which is a causal mask; a root with leaves; parents drawn among the nodes before, or none."""
MOST_NODES = 64
"""Queries of a sequence that has a tree: see `flashmoe_science.attention_varlen`."""


def words_of(kind: str, nodes: int, seed: str) -> list[int]:
    """For each node a number whose bit j says whether node j lies on its way; its own bit is set."""
    random = Random(seed)
    words: list[int] = []
    for node in range(nodes):
        parent = {"chain": node - 1, "star": min(node, 1) - 1, "random": random.randrange(-1, max(node, 1))}[
            kind
        ]
        words.append((words[parent] if node and parent >= 0 else 0) | 1 << node)
    return words
