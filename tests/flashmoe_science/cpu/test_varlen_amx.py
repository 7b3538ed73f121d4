"""Any lengths on the matrix unit: by loops in place of its instructions, and by these where there are any."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cpu_attention import GuardedMemory
from hypothesis import given
from hypothesis import strategies as st
from matrix_unit import UNITS, code_of, code_of_pairs
from varlen_cases import Call, Shape, bounds, forget_calls, packed, paged
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science import attention_varlen
from flashmoe_science.cpu import library
from flashmoe_science.cpu import varlen as cpu

BF16 = torch.bfloat16
BF16_LSE_ATOL = 4e-3
"""See test_varlen.py."""
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.02])
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": (37, 0)},
    "two-sided": {"causal": False, "window": (50, 9)},
    "chunk": {"chunk": 48},
    "cap and sinks": {"softcap": 3.0, "sinks": SINKS},
    "slopes": {"alibi_slopes": SLOPES},
    "cut": {"split_keys": 128},
    "cut, window": {"split_keys": 128, "window": (100, 0), "sinks": SINKS},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.fixture(scope="module", autouse=True, params=UNITS)
def unit(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every call of the kernel takes the code for the matrix unit."""
    instruction_set, macros = code_of(request.param)
    load = library.load_function
    with pytest.MonkeyPatch.context() as patch:
        forget_calls(patch)
        patch.setattr(
            cpu, "_load", lambda _, method: load("attention_varlen", method, instruction_set, macros)
        )
        yield request.param


def attend(call: Call, shape: Shape, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = attention_varlen(**call, **bounds(shape), **options, return_lse=True)  # type: ignore[arg-type]
    return out, lse


@each_option
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(32, 32), (64, 64), (96, 160), (192, 128)], ids=lambda dim: str(dim)
)
def test_as_exact_as_pytorch(head_dim: int, value_dim: int, options: dict[str, Any]) -> None:
    """Lengths on both sides of whole blocks and registers, rows that take other ways beside them, and none at all."""
    shape = Shape((70, 4, 1, 96, 40, 5, 0), (70, 131, 90, 257, 31, 0, 9), 4, 2, head_dim, value_dim, BF16)
    call = packed(shape)
    out, lse = attend(call, shape, **options)
    assert_as_exact_as_pytorch(out, lse, call, BF16_LSE_ATOL, **options)
    for page_size in (1, 16, 48, 64, 128):
        of_pages, its_lse = attend(paged(shape, page_size), shape, **options)
        assert torch.equal(of_pages, out)
        assert torch.equal(its_lse, lse)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 200)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]),
    head_dim=st.sampled_from([32, 64, 72, 128]),
    page_size=st.sampled_from([0, 5, 16, 32, 64, 96]),
    options=st.sampled_from(
        [each for each in OPTIONS.values() if not {"sinks", "alibi_slopes"} & each.keys()]
    ),
    seed=st.integers(0, 1000),
)
def test_any_batch(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    options: dict[str, Any],
    seed: int,
) -> None:
    queries, keys = zip(*lengths, strict=True)
    shape = Shape(queries, keys, *heads, head_dim, dtype=BF16)
    call = paged(shape, page_size, seed) if page_size else packed(shape, seed)
    out, lse = attend(call, shape, **options)
    assert_as_exact_as_pytorch(out, lse, call, BF16_LSE_ATOL, **options)


@pytest.mark.parametrize(
    "options", [{}, {"window": (50, 0)}, {"split_keys": 128}], ids=["causal", "window", "cut"]
)
def test_a_sequence_has_the_same_bits_whatever_comes_with_it(options: dict[str, Any]) -> None:
    """Which keys share a block with others depends on the sequence alone, and so do its tiles' sums."""
    alone = Shape((150,), (333,), 4, 2, 64, dtype=BF16)
    call = paged(alone, 16)
    expected, its_lse = attend(call, alone, **options)
    # Beside so many others a task has several tiles.
    for rows, keys in (((150, 1, 700), (333, 900, 700)), ((150, *[65] * 50), (333, *[70] * 50))):
        shape = Shape(rows, keys, 4, 2, 64, dtype=BF16)
        others = paged(shape, 16, 5)
        pages = -(-333 // 16)
        for name in ("key", "value"):
            table = others["block_table"][0, :pages].long()
            others[name][table] = call[name][call["block_table"][0, :pages].long()]
        others["query"][:150] = call["query"]
        out, lse = attend(others, shape, **options)
        assert torch.equal(out[:150], expected)
        assert torch.equal(lse[:150], its_lse)


@pytest.mark.parametrize("page_size", [0, 16])
def test_what_is_hidden_or_not_finite_stays_where_it_is(page_size: int) -> None:
    shape = Shape((90,), (150,), 2, 2, 64, dtype=BF16)
    call = packed(shape)
    call["key"][100, 0], call["value"][120, 1, 5] = math.nan, math.inf
    if page_size:
        in_pages = paged(shape, page_size)
        for name in ("key", "value"):
            position = torch.arange(150)
            page = in_pages["block_table"][0].long()[position // page_size]
            in_pages[name][page, position % page_size] = call[name]
        call = in_pages
    out, _ = attend(call, shape)
    rows = torch.arange(90) + 60
    assert torch.equal(out[:, 0].isnan().all(-1), rows >= 100)
    assert torch.equal(out[:, 0].isnan().any(-1), rows >= 100)
    assert torch.equal(~out[:, 1, 5].isfinite(), rows >= 120)
    assert out[:, 1, :5].isfinite().all()


@pytest.mark.parametrize("at_end", [False, True], ids=["start", "end"])
@pytest.mark.parametrize("keys", [32, 70, 96, 129])
def test_nothing_outside_the_tensors_is_read(keys: int, at_end: bool) -> None:
    """Sanitizers do not see what the unit's own instructions read; a page of memory that is not there does."""
    shape = Shape((20,), (keys,), 2, 1, 64, dtype=BF16)
    call = packed(shape)
    guarded = {
        name: GuardedMemory(each, at_end).tensor if each.dtype == BF16 else each
        for name, each in call.items()
    }
    for options in ({}, {"causal": False}, {"window": (9, 0)}):
        assert torch.equal(attend(guarded, shape, **options)[0], attend(call, shape, **options)[0])


def test_the_matrix_unit_is_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums have another order than those of dot products: bits differ somewhere."""
    shape = Shape((256,), (256,), 4, 4, 128, dtype=BF16)
    call = packed(shape)
    on_the_unit, _ = attend(call, shape)
    forget_calls(monkeypatch)
    load = library.load_function
    monkeypatch.setattr(cpu, "_load", lambda _, method: load("attention_varlen", method, *code_of_pairs()))
    by_dot_products, _ = attend(call, shape)
    assert not torch.equal(on_the_unit, by_dot_products)
    torch.testing.assert_close(on_the_unit, by_dot_products, atol=2e-2, rtol=2e-2)
