"""Blocks of a cluster that share a set of rows, and teams of blocks: the decode kernel's own source on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import NEEDS_COMPILER
from emulated_decode import inputs_of, options, run_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from varlen_cases import Shape, bounds, packed, paged
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science.configs.attention import decode as configs
from flashmoe_science.configs.attention.decode import Cache, Pages
from flashmoe_science.cuda.varlen import decode, decode_calls
from flashmoe_science.jit.nvrtc import compile_kernel
from flashmoe_science.varlen.arguments import check, check_sizes
from problems import H200


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 400)), min_size=0, max_size=8),
    page_size=st.sampled_from([0, 1, 16]),
    cluster=st.sampled_from([1, 2, 8]),
    team=st.sampled_from([1, 2, 4]),
    fours=st.integers(1, 17),
    heads=st.sampled_from([(8, 4), (4, 4)]),
    window=st.sampled_from([(-1, -1), (3, -1), (130, 5)]),
    sinks=st.booleans(),
    data=st.integers(0, 1000),
)
@NEEDS_COMPILER
def test_any_batch(
    lengths: list[tuple[int, int]],
    page_size: int,
    cluster: int,
    team: int,
    fours: int,
    heads: tuple[int, int],
    window: tuple[int, int],
    sinks: bool,
    data: int,
) -> None:
    queries, keys = zip(*lengths, strict=True) if lengths else ((), ())
    shape = Shape(queries, keys, *heads, 32, dtype=torch.bfloat16)
    call = paged(shape, page_size, data, garbage=1 << 30) if page_size else packed(shape, data)
    if sinks:
        call["sinks"] = 3 * torch.randn(heads[0], generator=torch.Generator().manual_seed(data))
    chosen = {"window": window}
    grid = fours * max(4, cluster)
    out, lse = run_on_cpu(call, options(**chosen), (4, 400), grid, team=team, cluster=cluster)
    assert_as_exact_as_pytorch(out, lse, call, **{**bounds(shape), "causal": True, **chosen})


@NEEDS_COMPILER
@pytest.mark.parametrize(("keys", "gathers"), [(1024, True), (2048, False)])
def test_a_set_is_a_clusters_where_that_is_not_longer_than_an_equal_share(keys: int, gathers: bool) -> None:
    """Two blocks of eight have half a set, of two sets; an equal share would be an eighth of both."""
    shape = Shape((1,), (keys,), 2, 2, 32, dtype=torch.bfloat16)
    workspace = torch.full((1 << 16,), torch.nan)
    counters = torch.zeros(512, dtype=torch.int32)
    call = packed(shape)
    out, lse = run_on_cpu(call, options(), (1, keys), 8, memory=(workspace, counters), cluster=2)
    assert_as_exact_as_pytorch(out, lse, call, **bounds(shape), causal=True)
    assert workspace.isnan().all() == gathers, "only parts that meet in device memory are left there"


def test_clusters_are_for_few_sets_of_rows() -> None:
    chosen = {sets: configs.cluster_for("sm_90", sets, 1024, 132) for sets in (1, 8, 17, 33, 34, 66, 67)}
    assert chosen == {1: 8, 8: 8, 17: 4, 33: 4, 34: 2, 66: 2, 67: 1}
    assert [configs.cluster_for("sm_90", sets, 100_000, 132) for sets in (8, 64)] == [1, 2]
    assert [configs.cluster_for("sm_90", sets, 128, 132) for sets in (8, 64)] == [1, 2]
    assert configs.cluster_for("sm_90", 8, 129, 132) == 8
    assert configs.cluster_for("sm_80", 8, 1024, 108) == 1


@pytest.mark.parametrize(
    ("kv_heads", "multiprocessors", "team"), [(8, 132, 4), (2, 132, 2), (1, 132, 1), (8, 142, 2), (6, 132, 2)]
)
def test_a_team_divides_heads_and_grid(kv_heads: int, multiprocessors: int, team: int) -> None:
    assert configs.team_for(kv_heads, multiprocessors) == team


@pytest.mark.parametrize(("at_once", "blocks"), [(0, 132), (15, 120), (16, 128), (33, 128)])
def test_a_grid_has_no_more_blocks_than_workspace_and_counters(
    at_once: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A multiprocessor runs two blocks of a kernel that takes less than half of its registers. Where no cluster
    fits, blocks work alone."""
    grids: list[tuple[int, int, int]] = []

    class NoLauncher:
        buffer = bytearray(decode_calls.ARGUMENT_BYTES)

        def __init__(self, _function: object, grid: tuple[int, int, int], *_: Any, **__: Any) -> None:
            grids.append(grid)

    monkeypatch.setattr(decode, "Launcher", NoLauncher)
    monkeypatch.setattr(decode, "load", lambda *arguments, **options: None)
    monkeypatch.setattr(decode, "clusters_at_once", lambda *arguments: at_once)
    inputs = inputs_of(packed(Shape((1,), (1000,), 4, 4, 32, dtype=torch.bfloat16)))
    problem = check(inputs, options())
    configuration = decode.configuration_for(problem, check_sizes(inputs, 1, 1000), H200)
    assert configuration.cluster == 8
    decode._make_launcher(configuration, problem, H200, False)
    assert grids == [(blocks, 1, 1)]


@pytest.mark.parametrize(
    ("window", "queries", "cluster"),
    [((127, 0), 1, 1), ((127, 0), 2, 8), ((124, 0), 4, 1), ((-1, 0), 1, 8), ((-1, 5), 1, 8)],
)
def test_a_window_leaves_few_keys(window: tuple[int, int], queries: int, cluster: int) -> None:
    """Where a cluster's blocks would have nothing to share."""
    inputs = inputs_of(packed(Shape((queries,), (1000,), 4, 4, 32, dtype=torch.bfloat16)))
    problem = check(inputs, options(causal=False, window=window))
    assert decode.configuration_for(problem, check_sizes(inputs, queries, 1000), H200).cluster == cluster


def test_kernels_that_would_spill_registers_have_no_clusters() -> None:
    usual = configs.configuration("sm_90", 128, 128, 32, Pages.TILES, False)
    assert configs.may_cluster(usual)
    assert not configs.may_cluster(replace(usual, tree=True))
    assert configs.may_cluster(replace(usual, tree=True, row_tiles=2))
    for pairs in (False, True):
        of_heads = configs.configuration(
            "sm_90", 64, 64, 8, Pages.TILES, False, Cache.SCALED_HEADS, pairs=pairs
        )
        assert configs.may_cluster(of_heads) is pairs


FP8 = [(cache, pairs, False) for cache in list(Cache)[1:] for pairs in (False, True)]


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("cache", "pairs", "tree"), [(Cache.PLAIN, False, False), (Cache.PLAIN, False, True), *FP8]
)
@pytest.mark.parametrize("pages", [Pages.TILES, Pages.ROWS])
@pytest.mark.parametrize(("head_dim", "rows"), [(64, 8), (128, 8), (128, 16), (128, 32)])
def test_kernels_for_clusters_have_no_defects(
    head_dim: int, rows: int, pages: Pages, cache: Cache, pairs: bool, tree: bool
) -> None:
    """Spills and a stack frame raise. Building ahead compiles kernels whose blocks work alone, and none for FP8."""
    usual = configs.configuration("sm_90", head_dim, head_dim, rows, pages, False, cache, pairs=pairs)
    chosen = replace(usual, tree=tree)
    for cluster in (1, 8) if configs.may_cluster(chosen) else (1,):
        compile_kernel(decode.kernel(replace(chosen, cluster=cluster), torch.bfloat16, "sm_90"))
