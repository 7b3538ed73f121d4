"""The decode kernel over a cache of FP8 without a GPU: its own source, compiled as C++, against an ideal kernel."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from compiled_for import each_architecture
from emulated import NEEDS_COMPILER
from emulated_decode import inputs_of, options, run_on_cpu
from varlen_cases import Shape, bounds, packed, paged, quantized
from varlen_quantized import assert_as_exact_as_ideal

from flashmoe_science.configs.attention import decode as configs
from flashmoe_science.configs.attention.decode import Cache, Pages
from flashmoe_science.cuda.varlen import decode, decode_workspace
from flashmoe_science.jit.limits import limits
from flashmoe_science.jit.nvrtc import compile_kernel
from flashmoe_science.varlen.arguments import check
from flashmoe_science.varlen.problem import Problem, Sizes
from problems import H200

BF16, FP16 = torch.bfloat16, torch.float16
SHAPE = Shape((1, 2, 1, 0, 1), (300, 7, 129, 16, 0), heads=4, kv_heads=2, head_dim=64, dtype=BF16)


@NEEDS_COMPILER
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("scales", ["one", "each head", "each key", "none"])
def test_scales(scales: str, page_size: int) -> None:
    call = paged(SHAPE, page_size) if page_size else packed(SHAPE)
    small, wide = quantized(call, scales)
    out, lse = run_on_cpu(small, options(), tuple(bounds(SHAPE).values()), 3)
    assert_as_exact_as_ideal(out, lse, call, wide, **bounds(SHAPE))


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "heads", "queries", "dtype"),
    [(128, 128, 8, 1, BF16), (128, 128, 8, 4, FP16), (192, 128, 4, 1, BF16), (40, 72, 6, 3, BF16)],
)
def test_dims_and_rows(head_dim: int, value_dim: int, heads: int, queries: int, dtype: torch.dtype) -> None:
    shape = Shape((queries, queries, 1), (200, 7, 33), heads, 2, head_dim, value_dim, dtype)
    call = paged(shape, 16, layout="HND")
    small, wide = quantized(call, "each key")
    out, lse = run_on_cpu(small, options(window=(60, 0)), tuple(bounds(shape).values()), 4)
    assert_as_exact_as_ideal(out, lse, call, wide, **bounds(shape), window=(60, 0))


@NEEDS_COMPILER
@pytest.mark.parametrize("scales", ["each head", "each key"])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "queries"),
    [(64, 64, 1), (128, 128, 1), (128, 128, 4), (192, 128, 1), (64, 256, 2), (256, 64, 1)],
)
def test_sixteen_codes_at_a_time(head_dim: int, value_dim: int, queries: int, scales: str) -> None:
    shape = Shape((queries, queries, 1), (200, 7, 33), 8, 2, head_dim, value_dim, BF16)
    call = paged(shape, 16)
    small, wide = quantized(call, scales)
    out, lse = run_on_cpu(small, options(), tuple(bounds(shape).values()), 4, pairs=True)
    assert_as_exact_as_ideal(out, lse, call, wide, **bounds(shape))


@NEEDS_COMPILER
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("grid", [2, 12])
@pytest.mark.parametrize(
    ("queries", "keys", "page_size", "warps", "key_tiles", "queue", "dim"),
    [
        # Sets of one pass, of as many as are copied ahead, of more, and of more than pages are looked up at a time.
        (1, (200, 7, 33), 0, 16, 1, 2, 128),
        (1, (3000, 5, 700), 16, 16, 1, 2, 128),
        (1, (9000, 5, 700), 16, 8, 1, 3, 128),
        (1, (3000, 5, 700), 0, 8, 1, 4, 128),
        (3, (9000, 5, 700), 48, 8, 2, 2, 128),
        (3, (200, 7, 33), 16, 8, 1, 3, 128),
        (8, (200, 7, 700), 16, 8, 1, 2, 128),
        (1, (700, 7, 300), 16, 8, 1, 2, 256),
    ],
)
def test_keys_by_way_of_shared_memory(
    queries: int,
    keys: tuple[int, ...],
    page_size: int,
    warps: int,
    key_tiles: int,
    queue: int,
    dim: int,
    grid: int,
    cluster: int,
) -> None:
    shape = Shape((queries, queries, 1), keys, 8, 2, dim, dim, BF16)
    call = paged(shape, page_size) if page_size else packed(shape)
    small, wide = quantized(call, "each head")
    changes = {"warps": warps, "key_tiles": key_tiles, "queue": queue, "cluster": cluster, "pairs": True}
    out, lse = run_on_cpu(small, options(), tuple(bounds(shape).values()), grid, **changes)
    assert_as_exact_as_ideal(out, lse, call, wide, **bounds(shape))


@pytest.mark.parametrize(
    ("cache", "dim", "rows", "sets", "most_keys", "expected"),
    [
        (Cache.SCALED_HEADS, 128, 8, 8, 2048, (8, 0)),  # clusters of four or eight have the sets
        (Cache.SCALED_HEADS, 128, 8, 8, 2049, (8, 3)),
        (Cache.SCALED_HEADS, 128, 8, 512, 512, (8, 0)),
        (Cache.SCALED_HEADS, 128, 8, 512, 513, (16, 2)),
        (Cache.SCALED_HEADS, 128, 32, 8, 1 << 17, (8, 0)),
        (Cache.SCALED_HEADS, 128, 32, 64, 1 << 17, (8, 2)),
        (Cache.SCALED_HEADS, 256, 8, 512, 100, (8, 2)),
        (Cache.SCALED_KEYS, 128, 8, 512, 1 << 17, (8, 0)),
        (Cache.PLAIN, 64, 8, 64, 0, (8, 3)),
        (Cache.PLAIN, 256, 8, 512, 1 << 17, (8, 0)),
    ],
)
def test_which_calls_copy_ahead(
    cache: Cache, dim: int, rows: int, sets: int, most_keys: int, expected: tuple[int, int]
) -> None:
    usual = configs.configuration("sm_90", dim, dim, rows, Pages.TILES, False, cache, pairs=bool(cache))
    chosen = configs.queued(usual, "sm_90", sets, most_keys, H200.multiprocessors)
    assert (chosen.warps, chosen.queue) == expected


def test_only_what_lanes_can_copy_whole_is_copied_ahead() -> None:
    def queue(architecture: str, cache: Cache, pages: Pages, pairs: bool, value_dim: int = 128) -> int:
        usual = configs.configuration(architecture, 128, value_dim, 16, pages, False, cache, pairs=pairs)
        return configs.queued(usual, architecture, 512, 8192, H200.multiprocessors).queue

    assert queue("sm_90", Cache.SCALED_HEADS, Pages.TILES, True) == 2
    assert queue("sm_90", Cache.PLAIN, Pages.PACKED, False) == 2
    assert queue("sm_120", Cache.PLAIN, Pages.TILES, False) == 0  # shared memory of a block has no room
    for architecture, cache, pages, pairs, value_dim in (
        ("sm_80", Cache.SCALED_HEADS, Pages.TILES, True, 128),
        ("sm_90", Cache.SCALED_KEYS, Pages.TILES, True, 128),
        ("sm_90", Cache.SCALED_HEADS, Pages.TILES, False, 128),
        ("sm_90", Cache.PLAIN, Pages.ROWS, False, 128),
        ("sm_90", Cache.PLAIN, Pages.TILES, False, 64),
    ):
        assert queue(architecture, cache, pages, pairs, value_dim) == 0


@NEEDS_COMPILER
@pytest.mark.parametrize("heads", [4, 8, 16])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_scales_of_keys_may_be_of_any_size_and_sign(dtype: torch.dtype, heads: int) -> None:
    """Weights that are multiplied in 16 bits have room for neither the largest nor the least of these."""
    shape = Shape((1, 1), (90, 200), heads, 1, 64, 64, dtype)
    call = packed(shape)
    small, wide = quantized(call, "each key")
    sizes = torch.tensor([-3.0, 0.0, 1e-12, 2e4, -1e-4, 1.0])[torch.arange(290) % 6]
    sizes[90:] *= 1e-3
    small["value_scale"] = sizes[:, None].contiguous()
    wide["value"] = small["value"].double() * sizes[:, None, None].double()
    out, lse = run_on_cpu(small, options(), tuple(bounds(shape).values()), 2)
    assert_as_exact_as_ideal(out, lse, call | {"value": wide["value"]}, wide, **bounds(shape))


@NEEDS_COMPILER
@pytest.mark.parametrize("scales", ["one", "each head", "each key"])
@pytest.mark.parametrize("zero", ["key", "value"])
def test_scales_of_zero(scales: str, zero: str) -> None:
    """As of a cache that nobody has written yet: keys are alike then, and values nothing."""
    call = paged(SHAPE, 16)
    small, wide = quantized(call, scales)
    if scales == "one":
        small[f"{zero}_scale"] = torch.tensor(0.0)
        wide[zero] = torch.zeros_like(wide[zero])
    else:  # one of the heads
        small[f"{zero}_scale"][..., 1] = 0.0
        wide[zero][..., 1, :] = 0.0
    out, lse = run_on_cpu(small, options(), tuple(bounds(SHAPE).values()), 3)
    assert_as_exact_as_ideal(out, lse, call, wide, **bounds(SHAPE))


def test_rows_that_begin_anywhere_are_read_by_eight_codes() -> None:
    def problem(shape: Shape, rows: int) -> Problem:
        small, _ = quantized(packed(shape), "each head")
        for name in ("key", "value"):
            wider = small[name].new_zeros(*small[name].shape[:-1], rows)
            small[name] = wider[..., : small[name].shape[-1]]
        return check(inputs_of(small), options())

    whole = Shape((1,), (40,), 2, 1, 64, 64, BF16)
    chosen = [
        decode.configuration_for(problem(shape, rows), Sizes(1, 40, 1), H200).pairs
        for shape, rows in (
            (whole, 64),
            (whole, 80),
            (whole, 72),
            (Shape((1,), (40,), 2, 1, 40, 40, BF16), 48),
        )
    ]
    assert chosen == [True, True, False, False]


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_code_is_widened_exactly(dtype: torch.dtype) -> None:
    """One key a sequence, so that the result is its value: all 256 codes."""
    codes = torch.arange(256, dtype=torch.uint8)
    value = codes.view(32, 1, 8).view(torch.float8_e4m3fn)
    call = {
        "query": torch.randn(32, 1, 8).to(dtype),
        "key": torch.zeros(32, 1, 8).to(value.dtype),
        "value": value,
        "cu_seqlens_q": torch.arange(33, dtype=torch.int32),
        "cu_seqlens_k": torch.arange(33, dtype=torch.int32),
    }
    out, _ = run_on_cpu(call, options(), (1, 1), 2)
    torch.testing.assert_close(out, value.to(dtype), rtol=0, atol=0, equal_nan=True)


@each_architecture(["sm_80", "sm_90"])
@pytest.mark.usefixtures("nvrtc")
def test_kernels_of_fp8_compile_without_spills(architecture: str) -> None:
    for dim, rows, pages, cache in (
        (64, 8, Pages.TILES, Cache.SCALED_HEADS),
        (128, 8, Pages.TILES, Cache.SCALED_HEADS),
        (128, 8, Pages.ROWS, Cache.SCALED_KEYS),
        (128, 16, Pages.TILES, Cache.SCALED_KEYS),
    ):
        chosen = configs.configuration(architecture, dim, dim, rows, pages, False, cache)
        compile_kernel(decode.kernel(chosen, BF16, architecture))


def queued_kernels(architecture: str) -> set[configs.DecodeConfiguration]:
    """All that a call may get, in clusters as well."""
    chosen = set()
    for cache, dim, rows, pages in itertools.product(
        (Cache.PLAIN, Cache.SCALED_HEADS), (64, 128, 256), (8, 16, 32), (Pages.PACKED, Pages.TILES)
    ):
        usual = configs.configuration(
            architecture, dim, dim, rows, pages, False, cache, pairs=cache is not Cache.PLAIN
        )
        for sets in (8, 50, 512):
            queued = configs.queued(usual, architecture, sets, 8192, H200.multiprocessors)
            cluster = configs.cluster_for(architecture, sets, 8192, H200.multiprocessors)
            chosen |= {queued, configs.clustered(queued, architecture, cluster)}
    return {each for each in chosen if each.queue}


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_what_is_copied_ahead_has_room_and_counters(architecture: str) -> None:
    chosen = queued_kernels(architecture)
    assert {each.queue for each in chosen} == {2, 3}
    for each in chosen:
        shared = each.shared_bytes + each.gathered_bytes + 4096
        assert shared <= limits(architecture).shared_per_block, each.label
        for multiprocessors in (132, 148, 160):
            assert decode_workspace.arrival_counters(multiprocessors, each) <= configs.MOST_ARRIVALS


@each_architecture(["sm_90", "sm_100", "sm_103"])
@pytest.mark.usefixtures("nvrtc")
def test_kernels_that_copy_ahead_compile_without_spills(architecture: str) -> None:
    """Their static shared memory is what `gathered_bytes` and a few kilobytes make room for."""
    for chosen in sorted(queued_kernels(architecture), key=lambda each: each.label):
        if chosen.pages is Pages.PACKED:
            continue
        # On sm_100 16 warps with chunks spill 12 bytes; that kernel is taken all the same.
        has_most = architecture == "sm_90" and chosen.cache and chosen.row_tiles < 4
        for changes in ({}, {"chunk": True}, {"tree": True}, {"score_changes": True}) if has_most else ({},):
            compiled = compile_kernel(decode.kernel(replace(chosen, **changes), BF16, architecture))
            assert compiled.resources.static_shared_bytes <= 4096 + chosen.gathered_bytes, chosen.label
