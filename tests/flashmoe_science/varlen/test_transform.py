"""Keys that are normed, rotated and quantised on their way into a cache."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashmoe_science import InputError, attention_varlen, paged_append
from flashmoe_science.varlen.transform import Rotary

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TOKENS, HEADS, KV_HEADS, DIM, PAGE = 12, 4, 2, 32, 8


def rows(heads: int, seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, heads, DIM, generator=torch.Generator().manual_seed(seed)).to(BF16)


def caches(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.zeros(3, PAGE, KV_HEADS, DIM).to(dtype) for _ in range(2))  # type: ignore[return-value]


def by_definition(
    x: torch.Tensor, position: int, weight: torch.Tensor, rotary_dim: int, interleaved: bool
) -> list[float]:
    """One head of one token in Python's float."""
    values = [float(v) for v in x]
    size = math.sqrt(sum(v * v for v in values) / len(values) + 1e-6)
    values = [v / size * float(w) for v, w in zip(values, weight, strict=True)]
    for i in range(rotary_dim // 2):
        angle = position / 10000 ** (2 * i / rotary_dim)
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rotary_dim // 2)
        first, second = values[a], values[b]
        values[a] = first * math.cos(angle) - second * math.sin(angle)
        values[b] = second * math.cos(angle) + first * math.sin(angle)
    return values


def table_of(rotary_dim: int) -> torch.Tensor:
    angles = torch.arange(64.0)[:, None] / 10000 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat([angles.cos(), angles.sin()], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [DIM, DIM // 2])
def test_norm_and_rotation(rotary_dim: int, interleaved: bool) -> None:
    key, value, query = rows(KV_HEADS, 0), rows(KV_HEADS, 1), rows(HEADS, 2)
    key_cache, value_cache = caches(BF16)
    positions = torch.arange(TOKENS) * 5
    weights = torch.rand(2, DIM) + 0.5
    result = paged_append(
        key,
        value,
        key_cache,
        value_cache,
        torch.arange(TOKENS) + 3,
        query=query,
        rotary=Rotary(table_of(rotary_dim), positions, interleaved),
        query_norm=weights[0],
        key_norm=weights[1],
    )
    written = key_cache.flatten(0, 1)[3 : 3 + TOKENS]
    assert torch.equal(value_cache.flatten(0, 1)[3 : 3 + TOKENS], value)
    for given, made, weight in ((query, result, weights[0]), (key, written, weights[1])):
        expected = torch.tensor(
            [
                [by_definition(head, int(position), weight, rotary_dim, interleaved) for head in token]
                for token, position in zip(given, positions, strict=True)
            ]
        )
        assert made.dtype == BF16
        torch.testing.assert_close(made.float(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("form", ["one", "each head", "each key", "none"])
def test_what_was_quantised_is_attended_to(form: str) -> None:
    key, value, query = rows(KV_HEADS, 0), rows(KV_HEADS, 1), rows(HEADS, 2)
    scales: dict[str, Any] = {
        "one": {"key_scale": torch.tensor(0.01), "value_scale": torch.tensor(0.02)},
        "each head": {"key_scale": torch.tensor([0.01, 0.02]), "value_scale": torch.tensor([0.02, 0.01])},
        "each key": {name: torch.zeros(3, PAGE, KV_HEADS) for name in ("key_scale", "value_scale")},
        "none": {},
    }[form]
    lengths = {
        "cu_seqlens_q": torch.tensor([0, TOKENS], dtype=torch.int32),
        "seqused_k": torch.tensor([TOKENS], dtype=torch.int32),
        "block_table": torch.tensor([[2, 0]], dtype=torch.int32),
        "max_seqlen_q": TOKENS,
        "max_seqlen_k": TOKENS,
    }
    slots = torch.cat([torch.arange(8) + 2 * PAGE, torch.arange(TOKENS - 8)])
    results = []
    for dtype, more in ((BF16, {}), (FP8, scales)):
        both = caches(dtype)
        assert paged_append(key, value, *both, slots, **more) is None
        results.append(attention_varlen(query, *both, **lengths, **more).float())
    exact, small = results
    assert (exact - small).square().mean() < 0.05**2 * exact.square().mean()


def test_what_is_too_large_saturates_and_zeros_have_a_scale() -> None:
    key = torch.tensor([[[1e6] * 8], [[0.0] * 8]])
    cache, scale = torch.zeros(1, 4, 1, 8).to(FP8), torch.ones(1, 4, 1)
    paged_append(key, key, cache, cache.clone(), torch.tensor([0, 1]))
    assert (cache[0, 0].float() == 448).all()
    paged_append(key, key, cache, cache.clone(), torch.tensor([2, -1]), key_scale=scale)
    assert torch.equal(cache[0, 2].float() * scale[0, 2], torch.full((1, 8), 1e6))
    assert scale[0, 3] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_norm": torch.ones(3)}, r"key_norm has shape \(3,\)"),
        ({"rotary": Rotary(torch.ones(9, 64), torch.arange(TOKENS))}, "cos_sin has shape"),
        ({"rotary": Rotary(torch.ones(99, 16), torch.arange(3))}, "positions has shape"),
        ({"key_scale": torch.ones(())}, "key_scale is given with a cache"),
        ({"query": torch.ones(TOKENS, 4, DIM, requires_grad=True)}, "requires a gradient"),
        (
            {"rotary": Rotary(torch.ones(99, 16, requires_grad=True), torch.arange(TOKENS))},
            "requires a gradient",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        paged_append(rows(KV_HEADS, 0), rows(KV_HEADS, 1), *caches(BF16), torch.arange(TOKENS), **options)
