"""The general kernel of `attention_varlen` without a GPU: tiles, what a launch passes, and its source on the CPU."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest
import torch
from emulated import NEEDS_COMPILER
from emulated_varlen import attend, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st
from varlen_cases import NAN, Call, Shape, bounds, packed, paged
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science.configs.attention import varlen as configs
from flashmoe_science.configs.attention.varlen import Features
from flashmoe_science.cuda.varlen import portable
from flashmoe_science.cuda.varlen.arguments import PER_CALL, TREE_MASK_AT, PlanArguments, division
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import check_block, limits
from flashmoe_science.jit.nvrtc import KERNEL_DIRECTORY, compile_kernel
from problems import H200

BF16, FP16 = torch.bfloat16, torch.float16
FEATURES = st.builds(Features, *(st.booleans() for _ in range(5)))
HEAD_DIMS = st.integers(1, 32).map(lambda n: 8 * n)
SHAPE = Shape((3, 1, 0, 36, 5), (5, 9, 2, 70, 0), 4, 2, 32, dtype=BF16)


def check(call: Call, shape: Shape = SHAPE, *, short: bool = True, **options: Any) -> None:
    given = {**bounds(shape), **options}
    out, lse = attend(call, short=short, **given)
    assert_as_exact_as_pytorch(out, lse, call, **given)


# --- tiles


@given(st.sampled_from(configs.ARCHITECTURES), HEAD_DIMS, HEAD_DIMS, FEATURES)
def test_tiles_hold_the_dimensions_and_fit(
    architecture: str, head_dim: int, value_dim: int, features: Features
) -> None:
    both = configs.tiles(architecture, head_dim, value_dim, features)
    for tile in (both.tall, both.short):
        assert tile.head_dim >= max(head_dim, tile.value_dim)
        assert tile.value_dim >= value_dim
        check_block(tile.label, architecture, tile.threads, tile.shared_bytes)
        lookups = 2 * 16 * tile.block_n + 64
        assert tile.shared_bytes + lookups <= limits(architecture).shared_per_block
        # What the kernel's static_asserts ask for.
        assert tile.block_m % (16 * tile.warps) == 0
        assert tile.block_n % 16 == 0
        assert tile.block_n <= tile.threads
    assert both.short.block_m <= both.tall.block_m


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90"])
@pytest.mark.parametrize("dimensions", [(64, 64), (128, 128), (192, 128), (256, 256), (32, 32)])
def test_nothing_spills(nvrtc: None, architecture: str, dimensions: tuple[int, int]) -> None:
    for features in (
        Features(packed_heads=True),
        Features(paged=True, packed_heads=True, left_window=True),
        Features(paged=True, packed_heads=True, left_window=True, softcap=True, alibi=True),
    ):
        both = configs.tiles(architecture, *dimensions, features)
        for tile in (both.tall, both.short):
            compile_kernel(portable.kernel(tile, BF16, architecture))  # raises KernelDefectError


def test_what_is_built_ahead_is_what_common_calls_take() -> None:
    built = {kernel.label for kernel in portable.kernels("sm_90")}
    for page_size in (0, 16):
        shape = Shape((4,), (8,), 8, 2, 128, dtype=BF16)
        call = paged(shape, page_size) if page_size else packed(shape)
        problem = problem_of(call)
        both = configs.tiles("sm_90", 128, 128, portable.features(problem))
        assert portable.kernel(both.tall, BF16, "sm_90").label in built
        assert portable.kernel(both.short, BF16, "sm_90").label in built
    assert portable.kernels("sm_75") == []


# --- arguments


def test_fields_are_those_of_the_headers_struct_in_order() -> None:
    text = re.sub(r"//[^\n]*|#[^\n]*", "", (KERNEL_DIRECTORY / "varlen/parameters.cuh").read_text())
    body = text[text.index("struct VarlenParameters {") :]
    body = body[body.index("{") + 1 : body.index("};")]
    names = [
        name.strip(" *\n")
        for declaration in body.split(";")
        for name in re.sub(r"^\s*(const\s+)?\w+", "", declaration).split(",")
    ]
    marked = PlanArguments(
        query=(101, 102, 103),
        key=(104, 105, 106),
        value=(107, 108, 109),
        output=(110, 111, 112),
        lse=(113, 114, 115),
        num_slices=201,
        heads_per_kv_head=6,
        seqlen_q=203,
        seqlen_k=204,
        tiles_per_sequence=205,
        head_dim=206,
        value_dim=207,
        window_left=208,
        window_right=-1,
        softmax_scale=-1.0,
        softcap=2.0,
        page_size=48,
        chunk=24,
    )
    buffer = ctypes.create_string_buffer(TREE_MASK_AT)
    marked.pack_into(buffer)
    pointers = 11
    assert names[:pointers] == [
        *("query", "key", "value", "output", "lse", "query_starts", "key_starts", "key_counts"),
        *("page_table", "sinks", "alibi_slopes"),
    ]
    assert names[pointers : pointers + 6] == [
        *("table_row", "alibi_batch", "batch", "num_tokens", "num_tiles", "slices_per_section")
    ]
    strides = names[pointers + 6 : pointers + 21]
    assert strides[:3] == ["query_batch", "query_head", "query_row"]
    assert strides[-3:] == ["lse_batch", "lse_head", "lse_row"]
    longs = (ctypes.c_int64 * 15).from_buffer(buffer, PER_CALL.size)
    assert list(longs) == list(range(101, 116))
    after = PER_CALL.size + 15 * 8
    words = (ctypes.c_uint32 * 21).from_buffer(buffer, after)
    assert names[pointers + 21 : pointers + 39] == [
        *("num_slices", "heads_per_kv_head", "seqlen_q", "seqlen_k", "tiles_per_sequence", "head_dim"),
        *("value_dim", "window_left", "window_right", "page_size", "page_multiplier", "page_shift"),
        *("group_multiplier", "group_shift", "scale_log2", "softcap_log2", "softcap_rate", "query_xor"),
    ]
    assert list(words[:10]) == [201, 6, 203, 204, 205, 206, 207, 208, 1 << 30, 48]
    assert words[10:14] == [*division(48), *division(6)]
    floats = (ctypes.c_float * 3).from_buffer(buffer, after + 14 * 4)
    assert list(floats) == pytest.approx([1.442695, 2.885390, 1.442695])
    assert words[17] == 0x80008000
    assert names[pointers + 39 :] == ["chunk", "chunk_multiplier", "chunk_shift", "tree_mask", ""]
    assert list(words[18:21]) == [24, *division(24)]
    assert after + 21 * 4 + 4 == TREE_MASK_AT  # a multiple of its size


@given(st.integers(1, (1 << 31) - 1), st.integers(0, (1 << 31) - 1))
def test_division_by_multiplication(divisor: int, x: int) -> None:
    multiplier, shift = division(divisor)
    assert multiplier < 1 << 32
    for numerator in (x, x - x % divisor, max(0, x - x % divisor - 1)):
        assert ((2 * numerator * multiplier) >> 32) >> shift == numerator // divisor


def test_rows_that_do_not_start_at_16_bytes_are_refused() -> None:
    call = packed(SHAPE)
    call["key"] = torch.zeros(call["key"].shape[0], 2, 36, dtype=BF16)[..., :32]
    with pytest.raises(InputError, match=r"key has strides .*multiples of 16 bytes; pass key\.contiguous"):
        portable.prepare(problem_of(call), H200, 1)


def test_what_it_does_not_take() -> None:
    problem = problem_of(packed(Shape((1,), (1,), 1, 1, 32)))
    assert "query is torch.float32" in str(portable.why_not(problem, H200, 1))
    large = problem_of(packed(Shape((1,), (1,), 1, 1, 264, dtype=BF16)))
    assert "head_dim is 264" in str(portable.why_not(large, H200, 1))
    assert portable.why_not(problem_of(packed(SHAPE)), H200, 1) is None


# --- the source, on the CPU


@NEEDS_COMPILER
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_packed(causal: bool, short: bool, one_thread: None) -> None:
    check(packed(SHAPE, spare_rows=9, spare_keys=3), causal=causal, short=short)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("page_size", "layout"), [(16, "NHD"), (1, "HND"), (48, "joint"), (16, "interleaved")]
)
def test_pages(page_size: int, layout: str, one_thread: None) -> None:
    check(paged(SHAPE, page_size, layout=layout, spare_rows=2, garbage=1 << 30))


@NEEDS_COMPILER
@pytest.mark.parametrize("lengths", [(15, 16, 17), (31, 32, 33), (63, 64, 65), (0, 1, 2)])
def test_lengths_about_a_page_and_a_tile(lengths: tuple[int, int, int], one_thread: None) -> None:
    shape = Shape((1, 3, 2), lengths, 2, 1, 32, dtype=BF16)
    check(paged(shape, 16), shape)


@NEEDS_COMPILER
def test_more_queries_than_keys_and_none_of_either(one_thread: None) -> None:
    shape = Shape((70, 0, 33, 1, 0), (5, 7, 0, 1, 0), 4, 2, 32, dtype=BF16)
    call = packed(shape)
    call["sinks"] = torch.tensor([0.0, 3.0, float("-inf"), 100.0])
    check(call, shape)
    check(packed(shape), shape, causal=False)


@NEEDS_COMPILER
def test_a_batch_of_no_sequences_leaves_zeros(one_thread: None) -> None:
    shape = Shape((), (), 4, 2, 32, dtype=BF16)
    check(packed(shape, spare_rows=70), shape)


@NEEDS_COMPILER
def test_many_sequences_are_told_apart(one_thread: None) -> None:
    """More than a warp looks at in one go, some of them empty, one of several tiles."""
    queries = tuple((1, 0, 2, 3, 0)[index % 5] for index in range(60)) + (40,) + (0,) * 10 + (1,)
    keys = tuple((4 * index) % 37 for index in range(60)) + (50,) + (3,) * 10 + (33,)
    shape = Shape(queries, keys, 2, 1, 32, dtype=BF16)
    check(packed(shape, spare_rows=4), shape)


@NEEDS_COMPILER
@pytest.mark.parametrize("window", [(0, 0), (9, 4), (-1, 3), (70, -1)])
def test_windows(window: tuple[int, int], one_thread: None) -> None:
    shape = Shape((40, 3, 1), (150, 90, 140), 2, 1, 32, dtype=BF16)
    check(paged(shape, 16), shape, causal=False, window=window)


@NEEDS_COMPILER
def test_what_no_row_of_a_window_sees_is_not_read(one_thread: None) -> None:
    shape = Shape((5,), (200,), 2, 1, 32, dtype=BF16)
    call = paged(shape, 1)
    hidden = call["block_table"][0, :180].long()
    call["key"][hidden] = NAN
    call["value"][hidden] = float("inf")
    check(call, shape, window=(15, 0))  # row 0 sees keys 180 to 195


@NEEDS_COMPILER
@pytest.mark.parametrize("slopes", [(4,), (5, 4)])
def test_cap_slopes_and_sinks(slopes: tuple[int, ...], one_thread: None) -> None:
    call = paged(SHAPE, 16)
    call["alibi_slopes"] = torch.rand(slopes)
    call["sinks"] = torch.tensor([0.0, 1.0, float("-inf"), 8.0])
    check(call, softcap=3.0, causal=False, window=(40, 6))


@NEEDS_COMPILER
def test_a_cap_holds_scores_that_are_huge(one_thread: None) -> None:
    call = packed(SHAPE)
    call["query"] *= 1e4
    check(call, softcap=20.0)
    call["query"] *= 1e-6
    check(call, softcap=20.0)


@NEEDS_COMPILER
@pytest.mark.parametrize(("heads", "dtype"), [((3, 3), FP16), ((6, 2), BF16), ((5, 1), BF16)])
def test_heads(heads: tuple[int, int], dtype: torch.dtype, one_thread: None) -> None:
    shape = Shape((40, 1, 9), (70, 33, 9), *heads, 32, dtype=dtype)
    call = packed(shape)
    if heads[0] == heads[1]:
        call["alibi_slopes"] = torch.linspace(0.1, 0.9, heads[0])
    check(call, shape)


@NEEDS_COMPILER
@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 40), (40, 32)])
def test_values_of_another_dimension(head_dim: int, value_dim: int, one_thread: None) -> None:
    shape = Shape((40, 1, 9), (70, 33, 9), 2, 1, head_dim, value_dim, BF16)
    check(paged(shape, 16), shape)


@NEEDS_COMPILER
def test_results_go_where_they_are_wanted_and_nowhere_else(one_thread: None) -> None:
    call = packed(SHAPE)
    tokens = call["query"].shape[0]
    whole = torch.full((tokens, 6, 48), 7.0, dtype=BF16)
    call["out"] = whole[:, 1:5, 8:40]
    out, lse = attend(call, **bounds(SHAPE))
    del call["out"]
    assert_as_exact_as_pytorch(out, lse, call, **bounds(SHAPE))
    whole[:, 1:5, 8:40] = 7.0
    assert bool((whole == 7.0).all())


@NEEDS_COMPILER
@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 100)), max_size=4),
    st.sampled_from([1, 16, 20]),
    st.booleans(),
    st.tuples(st.integers(-1, 60), st.integers(-1, 20)),
)
def test_any_lengths(
    lengths: list[tuple[int, int]], page_size: int, causal: bool, window: tuple[int, int]
) -> None:
    shape = Shape(tuple(q for q, _ in lengths), tuple(k for _, k in lengths), 2, 1, 32, dtype=BF16)
    check(paged(shape, page_size, spare_rows=1), shape, causal=causal, window=window)
