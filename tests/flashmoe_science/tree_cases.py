"""Trees of draft tokens, as speculative decoding verifies them."""

from __future__ import annotations

import random

import torch
from varlen_cases import Call, Shape, packed, paged

TREES = {
    "chains": [("chain", 5, 40), ("chain", 8, 8), ("chain", 1, 33), ("chain", 7, 129)],
    "stars": [("star", 4, 4), ("star", 8, 70), ("star", 5, 21)],
    "random": [
        ("random", 8, 260),
        ("random", 1, 17),
        ("random", 0, 9),
        ("random", 5, 16),
        ("random", 7, 131),
    ],
    "more queries than keys": [("random", 6, 2), ("random", 8, 0), ("random", 5, 60)],
    "larger": [("random", 64, 200), ("random", 33, 33), ("star", 16, 90), ("random", 3, 100)],
    "beside prompts": [("none", 65, 150), ("random", 8, 129), ("none", 90, 70), ("star", 40, 41)],
}
"""Sequences: the kind of tree, how many nodes, that is queries, it has, and how many keys."""
FEW = ("chains", "stars", "random", "more queries than keys")
"""Those that the decode kernel takes."""


def shape_of(trees: str, **changes: object) -> tuple[Shape, list[list[int]]]:
    """With the parents of each sequence's nodes."""
    _, queries, keys = zip(*TREES[trees], strict=True)
    usual = {"heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": torch.bfloat16}
    parents = [tree_of(kind, nodes, seed) for seed, (kind, nodes, _) in enumerate(TREES[trees])]
    return Shape(queries, keys, **{**usual, **changes}), parents  # type: ignore[arg-type]


def call_of(shape: Shape, parents: list[list[int]], page_size: int) -> Call:
    """Packed where page_size is 0. Rows of no sequence follow, whose words are garbage."""
    call = paged(shape, page_size, spare_rows=2) if page_size else packed(shape, spare_rows=2)
    return {**call, "tree_mask": tree_mask(parents, spare_rows=2)}


def tree_of(kind: str, nodes: int, seed: int) -> list[int]:
    """Where it is none, words see themselves alone: they are not looked at."""
    if kind == "chain":
        return chain(nodes)
    return random_tree(nodes, seed) if kind == "random" else [-1, *([0] * (nodes - 1))][:nodes]


def chain(nodes: int) -> list[int]:
    """One branch: a causal mask."""
    return list(range(-1, nodes - 1))


def random_tree(nodes: int, seed: int) -> list[int]:
    """The parent of each node, before it; -1: the node follows the sequence's tokens."""
    generator = random.Random(seed)
    return [generator.randrange(-1, node) if node else -1 for node in range(nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to this one, itself included."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def words_of(parents: list[int]) -> list[int]:
    """For each node a bit for every node that it sees, as int64 has them."""
    words = [
        sum(1 << seen for seen in path_to(parents, node)) for node in range(len(parents))
    ]  # of any length
    return [(word + (1 << 63)) % (1 << 64) - (1 << 63) for word in words]


def tree_mask(trees: list[list[int]], spare_rows: int = 0) -> torch.Tensor:
    """Of a batch whose sequences have these trees; rows behind the last see whatever."""
    return torch.tensor(
        [word for parents in trees for word in words_of(parents)] + [-1] * spare_rows, dtype=torch.int64
    )
