"""The Hopper kernel for prompts beside decode steps without a GPU: its own source, compiled as C++, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from emulated import NEEDS_COMPILER
from emulated_decode import inputs_of, options
from emulated_mixed_hopper import attend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from varlen_cases import Shape, bounds, drawn, packed, paged
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science.configs.attention import mixed_hopper as configs
from flashmoe_science.configs.attention.hopper_varlen import HopperFeatures
from flashmoe_science.cuda.varlen import mixed_hopper
from flashmoe_science.cuda.varlen.kind import VarlenKernel
from flashmoe_science.cuda.varlen.select import OVERRIDE_VARIABLE, candidates, select
from flashmoe_science.jit.limits import check_block
from flashmoe_science.jit.nvrtc import compile_kernel
from flashmoe_science.varlen.arguments import check
from flashmoe_science.varlen.problem import Sizes
from problems import H200

BATCH = Shape(
    (1, 100, 2, 0, 1, 8, 70, 9, 1, 3),
    (300, 130, 3, 40, 0, 700, 70, 20, 1, 0),
    heads=4,
    kv_heads=2,
    head_dim=64,
    dtype=torch.bfloat16,
)


@NEEDS_COMPILER
@pytest.mark.parametrize("grid", [2, 5, 16])
@pytest.mark.parametrize("page_size", [0, 16, 64, 256])
def test_prompts_and_decode_steps(page_size: int, grid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = paged(BATCH, page_size, spare_rows=3) if page_size else packed(BATCH, spare_rows=3)
    out, lse = attend(call, options(), tuple(bounds(BATCH).values()), monkeypatch, grid)
    assert_as_exact_as_pytorch(out, lse, call, **bounds(BATCH))


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"), [(128, 8, 2), (128, 8, 1), (64, 3, 3), (64, 64, 1)]
)
def test_dims_and_heads(head_dim: int, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((1, 40, 1, 2), (300, 200, 64, 900), heads, kv_heads, head_dim, dtype=torch.float16)
    call = paged(shape, 16)
    out, lse = attend(call, options(), tuple(bounds(shape).values()), monkeypatch)
    assert_as_exact_as_pytorch(out, lse, call, **bounds(shape))


@NEEDS_COMPILER
def test_teams_of_four_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((1, 40, 1, 2), (300, 200, 64, 900), 16, 8, 64, dtype=torch.bfloat16)
    for chosen in ({}, {"chunk": 128}):
        call = paged(shape, 16)
        out, lse = attend(call, options(**chosen), tuple(bounds(shape).values()), monkeypatch, 20)
        assert_as_exact_as_pytorch(out, lse, call, **bounds(shape), **chosen)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "queries", [(1, 2, 8, 1), (90, 64, 9, 300), (0, 0, 0, 0)], ids=["decode steps", "prompts", "nothing"]
)
def test_of_one_kind(queries: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(queries, (300, 200, 64, 900), 4, 2, 64, dtype=torch.bfloat16)
    call = paged(shape, 16, spare_rows=2)
    out, lse = attend(call, options(), tuple(bounds(shape).values()), monkeypatch)
    assert_as_exact_as_pytorch(out, lse, call, **bounds(shape))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(
        st.tuples(st.one_of(st.integers(0, 9), st.integers(0, 200)), st.integers(0, 400)), max_size=40
    ),
    page_size=st.sampled_from([0, 16, 64, 80]),
    grid=st.integers(2, 40),
    heads=st.sampled_from([(4, 2), (2, 2), (12, 1)]),
    causal=st.booleans(),
    window=st.sampled_from([(-1, -1), (0, 0), (40, 2), (130, 5), (-1, 7)]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    extras=st.sampled_from([(), ("sinks",), ("sinks", "rows")]),
    data=st.integers(0, 1000),
)
@NEEDS_COMPILER
def test_any_batch(
    lengths: list[tuple[int, int]],
    page_size: int,
    grid: int,
    heads: tuple[int, int],
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    extras: tuple[str, ...],
    data: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries, keys = zip(*lengths, strict=True) if lengths else ((), ())
    shape = Shape(queries, keys, *heads, 64, dtype=torch.bfloat16)
    call = drawn(shape, page_size, data, extras)
    chosen = {"causal": causal, "window": window, "softcap": softcap}
    out, lse = attend(call, options(**chosen), (200, 400), monkeypatch, grid)
    assert_as_exact_as_pytorch(out, lse, call, **{**bounds(shape), **chosen})


@NEEDS_COMPILER
def test_the_bits_of_a_decode_step_depend_on_the_grid_and_of_a_prompt_on_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call, most = paged(BATCH, 16), tuple(bounds(BATCH).values())
    first, again = (attend(call, options(), most, monkeypatch, 7) for _ in range(2))
    assert all(map(torch.equal, first, again))
    other, _ = attend(call, options(), most, monkeypatch, 12)
    prompt = slice(1, 101)
    assert torch.equal(other[prompt], first[0][prompt])


def test_it_is_taken_where_it_is_faster_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    call, sizes = paged(dataclasses.replace(BATCH, head_dim=128, value_dim=128), 16), Sizes(9, 100, 700)
    problem = check(inputs_of(call), options())
    assert select(problem, H200, sizes, 116) is VarlenKernel.MIXED_HOPPER
    small = dataclasses.replace(problem, head_dim=64, value_dim=64)
    assert select(small, H200, sizes, 116) is VarlenKernel.HOPPER
    assert VarlenKernel.MIXED_HOPPER not in candidates(problem, H200, sizes, 900)
    monkeypatch.setenv(OVERRIDE_VARIABLE, "mixed_hopper")
    assert select(problem, H200, sizes, 900) is VarlenKernel.MIXED_HOPPER


def test_what_it_cannot_do_is_said() -> None:
    problem = check(inputs_of(paged(BATCH, 16)), options())
    assert mixed_hopper.why_not(problem, H200, 127) is None
    for change, reason in (
        ({"split_keys": 128}, "split"),
        ({"tree": True}, "trees"),
        ({"value_dim": 128}, "both 64 or 128"),
        ({"page_size": 24}, "pages of 24"),
        ({"num_heads": 256}, "up to 64 query heads share keys"),
        ({"softcap": 2.0, "head_dim": 128, "value_dim": 128}, "soft cap"),
    ):
        assert reason in str(mixed_hopper.why_not(dataclasses.replace(problem, **change), H200, 127))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_kernels_fit_and_compile_without_spills(group: int, dtype: torch.dtype) -> None:
    for features in (
        HopperFeatures(True, page_rows=16),
        HopperFeatures(True, left_window=True),
        HopperFeatures(True, softcap=True, page_rows=64),
    ):
        chosen = configs.configuration(128, 128, group, features)
        check_block("mixed_hopper", "sm_90", chosen.threads, chosen.shared_bytes)
        compile_kernel(mixed_hopper.kernel(chosen, dtype))
