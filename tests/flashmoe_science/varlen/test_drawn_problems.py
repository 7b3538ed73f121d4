"""Problems of `attention_varlen` whose options, lengths and layouts are drawn together, on the CPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from varlen_cases import Shape, bounds, packed, paged
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science import attention_varlen

QUERIES = (0, 1, 1, 1, 2, 3, 7, 8, 9, 15, 17, 33, 64, 65)
KEYS = (0, 1, 15, 16, 17, 63, 64, 65, 128, 129, 257)
PAGES = (1, 5, 16, 48, 64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DRAWS = 12
"""Of a test; 16 tests with ``--slow``."""


def shape_of(draw: random.Random) -> Shape:
    kv_heads = draw.choice([1, 2, 3])
    queries = tuple(draw.choice(QUERIES) for _ in range(draw.randint(1, 4)))
    keys = tuple(
        draw.choice(KEYS) if draw.random() < 0.5 else max(0, count + draw.randint(-3, 60))
        for count in queries
    )
    return Shape(
        queries,
        keys,
        heads=kv_heads * draw.choice([1, 2, 4]),
        kv_heads=kv_heads,
        head_dim=8 * draw.randint(1, 12),
        value_dim=8 * draw.randint(1, 12),
        dtype=draw.choice(DTYPES),
    )


def options_of(draw: random.Random, shape: Shape, rows: int) -> dict[str, Any]:
    """What goes by position is left out beside a tree, as such calls are refused."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    options: dict[str, Any] = {"causal": draw.random() < 0.6, "window": (-1, draw.choice([-1, 0, 3, 20]))}
    if draw.random() < 0.3:
        options["sinks"] = torch.randn(shape.heads, generator=generator) * 3
    if draw.random() < 0.3:
        options["softcap"] = draw.choice([0.5, 5.0, 50.0])
    if draw.random() < 0.3:
        options["softmax_scale"] = draw.choice([0.02, 0.4])
    if draw.random() < 0.25:
        words = [draw.getrandbits(64) - (1 << 63) for _ in range(rows)]
        return options | {"tree_mask": torch.tensor(words)}
    if draw.random() < 0.4:
        options["window"] = draw.choice([0, 5, 16, 63, 100]), options["window"][1]
    if draw.random() < 0.3:
        options["chunk"] = draw.choice([1, 3, 16, 50, 64])
    if draw.random() < 0.3:
        size = (len(shape.queries), shape.heads) if draw.random() < 0.5 else (shape.heads,)
        options["alibi_slopes"] = torch.rand(size, generator=generator)
    return options


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed else ()) for seed in range(16)]
)
def test_drawn_problems(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(DRAWS):
        shape = shape_of(draw)
        call = packed(shape) if draw.random() < 0.4 else paged(shape, draw.choice(PAGES), spare_rows=2)
        options = options_of(draw, shape, call["query"].shape[0])
        split_keys = draw.choice([None, 128])
        out, lse = attention_varlen(
            **call,
            **bounds(shape),  # type: ignore[arg-type]
            **options,
            split_keys=split_keys,
            return_lse=True,
        )
        rows = sum(shape.queries)
        assert (out[rows:] == 0).all()
        whole = {**call, "query": call["query"][:rows]}
        if "tree_mask" in options:
            options["tree_mask"] = options["tree_mask"][:rows]
        atol = 4e-3 if shape.dtype is torch.bfloat16 else 5e-5
        assert_as_exact_as_pytorch(out[:rows], lse[:rows], whole, atol, **options)
