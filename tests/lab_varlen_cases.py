"""Small batches of sequences for tests of the operation, one of each kind."""

from __future__ import annotations

from dataclasses import replace

import torch

from cudadent42.operations.attention_varlen.case import VarlenCase

CASE = VarlenCase("unit", "fp32", 5, 4, 2, longest=60, shortest=7, head_dim=16, page_size=8)
VARIANTS = {
    "decode": CASE,
    "packed": replace(CASE, page_size=0),
    "prompts": replace(CASE, queries=0),
    "full": replace(CASE, queries=0, causal=False),
    "mixed": replace(CASE, chunks=2, chunk=9),
    "window": replace(CASE, queries=3, window=5),
    "more queries": replace(CASE, queries=70),
    "fp8, one scale": replace(CASE, dtype="bf16", fp8_scales="all"),
    "fp8, scales of heads": replace(CASE, dtype="bf16", fp8_scales="head", queries=3),
    "fp8, scales of keys": replace(CASE, dtype="bf16", fp8_scales="key"),
    "random trees": replace(CASE, queries=6, tree="random"),
    "chains": replace(CASE, queries=8, tree="chain", page_size=0),
    "stars": replace(CASE, queries=4, tree="star", causal=False),
    "trees beside prompts": replace(CASE, queries=5, tree="random", chunks=2, chunk=70),
    "more nodes than keys": replace(CASE, queries=30, tree="random"),
    "a soft cap": replace(CASE, queries=3, softcap=2.0),
    "a soft cap, prompts": replace(CASE, queries=0, softcap=2.0, page_size=0),
    "a soft cap, a window, sinks": replace(CASE, queries=0, softcap=2.0, window=5, sinks=True),
    "a soft cap over fp8": replace(CASE, dtype="bf16", fp8_scales="head", softcap=2.0),
    "sinks": replace(CASE, queries=3, sinks=True),
    "sinks and a window": replace(CASE, window=5, sinks=True, page_size=0),
    "sinks, prompts": replace(CASE, queries=0, sinks=True),
    "sinks, more queries": replace(CASE, queries=70, sinks=True),
    "sinks over fp8": replace(CASE, dtype="bf16", fp8_scales="key", sinks=True),
    "ALiBi": replace(CASE, queries=3, alibi=True),
    "ALiBi, prompts": replace(CASE, queries=0, alibi=True, page_size=0),
    "ALiBi, full": replace(CASE, queries=0, alibi=True, causal=False),
    "ALiBi, a cap, a window, sinks": replace(CASE, queries=2, alibi=True, softcap=2.0, window=5, sinks=True),
    "ALiBi, more queries": replace(CASE, queries=70, alibi=True),
    "ALiBi over fp8": replace(CASE, dtype="bf16", fp8_scales="head", alibi=True),
    "narrow values": replace(CASE, queries=2, value_dim=8),
    "wide values, prompts": replace(CASE, queries=0, value_dim=32, page_size=0),
    "narrow values, a cap": replace(CASE, queries=0, value_dim=8, softcap=2.0, sinks=True),
    "narrow values over fp8": replace(CASE, dtype="bf16", fp8_scales="key", value_dim=8),
    "fp8, packed": replace(CASE, dtype="bf16", fp8_scales="key", page_size=0),
}


def seen_by_nodes(case: VarlenCase, index: int, queries: int, keys: int) -> torch.Tensor:
    """(queries, keys) booleans, bit by bit."""
    seen = torch.ones(queries, keys, dtype=torch.bool)
    for row, word in enumerate(case.words(index)):
        for node in range(queries):
            if keys - queries + node >= 0:
                seen[row, keys - queries + node] = bool(word >> node & 1)
    return seen


def nothing() -> None:
    return
