"""The Hopper kernel for sequences of any lengths: its own source on the CPU, and what the host decides for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated import NEEDS_COMPILER
from emulated_hopper_varlen import Call, attend, tile_of
from emulated_varlen import problem_of
from hypothesis import given, settings
from hypothesis import strategies as st
from varlen_cases import Shape, bounds, packed, paged
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science.configs.attention import hopper_varlen as configs
from flashmoe_science.cuda.varlen import hopper
from flashmoe_science.jit.limits import limits
from problems import H200, L4

BF16, FP16 = torch.bfloat16, torch.float16
NAN = float("nan")


def check(
    call: Call, shape: Shape, monkeypatch: pytest.MonkeyPatch, wide: bool = False, **options: Any
) -> None:
    given = {**bounds(shape), **options}
    out, lse = attend(call, monkeypatch, wide=wide, **given)
    assert_as_exact_as_pytorch(out, lse, call, **given)


SPILL_OPTIONS: tuple[dict[str, Any], ...] = tuple(
    {"causal": causal, "window": window, "softcap": softcap, **chunk}
    for causal in (True, False)
    for window in ((-1, -1), (100, 0 if causal else 7))
    for softcap in (0.0, 5.0)
    for chunk in ({}, {"chunk": 128})
    if causal or not chunk
)
"""What kernels are compiled apart for."""
RAGGED = Shape((130, 1, 0, 33, 2), (200, 77, 9, 20, 0), 4, 2, 64, dtype=BF16)


@NEEDS_COMPILER
@pytest.mark.parametrize("causal", [True, False])
def test_packed_with_rows_of_no_sequence(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check(packed(RAGGED, spare_rows=5), RAGGED, monkeypatch, causal=causal)


@NEEDS_COMPILER
def test_packed_with_slots_that_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    check(packed(RAGGED, spare_keys=3), RAGGED, monkeypatch)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("page_size", "layout"), [(16, "NHD"), (48, "HND"), (256, "joint"), (1, "interleaved")]
)
def test_pages(page_size: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(paged(RAGGED, page_size, layout=layout, spare_rows=2, garbage=1 << 30), RAGGED, monkeypatch)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("page_size", "layout"), [(1, "NHD"), (5, "HND"), (4, "joint"), (198, "interleaved"), (8, "NHD")]
)
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(128, 128), pytest.param(192, 128, marks=pytest.mark.slow), (256, 256), (40, 72), (192, 192)],
)
def test_pages_that_no_box_fits(
    head_dim: int, value_dim: int, page_size: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape((70, 3, 0, 1), (210, 20, 9, 0), 2, 1, head_dim, value_dim, BF16)
    if layout == "joint" and head_dim != value_dim:
        layout = "NHD"
    call = paged(shape, page_size, layout=layout, spare_rows=2, garbage=1 << 30)
    check(call, shape, monkeypatch)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("causal", "window"), [(True, (128, 0)), (False, (17, 5)), (True, (0, 0)), (False, (-1, -1))]
)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_windows_over_pages_that_no_box_fits(
    softcap: float, causal: bool, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape((300, 1, 150), (300, 500, 100), 2, 2, 64, dtype=FP16)
    check(paged(shape, 4), shape, monkeypatch, causal=causal, window=window, softcap=softcap)


@NEEDS_COMPILER
def test_pages_of_which_a_block_has_six(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are told of at a time, and no multiple of that."""
    shape = Shape((70, 3), (140, 20), 2, 1, 192, dtype=BF16)
    check(paged(shape, 16, garbage=1 << 30), shape, monkeypatch)


@NEEDS_COMPILER
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 1), (8, 1)])
def test_heads(heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((70, 3, 17), (140, 150, 17), heads, kv_heads, 64, dtype=FP16)
    check(packed(shape), shape, monkeypatch)


@NEEDS_COMPILER
@pytest.mark.parametrize(("head_dim", "value_dim"), [(128, 128), (192, 128), (256, 256), (40, 72)])
def test_dimensions(head_dim: int, value_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((70, 3), (140, 20), 2, 1, head_dim, value_dim, BF16)
    check(packed(shape), shape, monkeypatch)


@NEEDS_COMPILER
def test_the_wide_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((400, 3, 190), (400, 140, 500), 1, 1, 64, dtype=BF16)
    check(packed(shape), shape, monkeypatch, wide=True)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("causal", "window"), [(True, (128, 0)), (False, (17, 5)), (True, (0, 0)), (False, (-1, 3))]
)
def test_windows(causal: bool, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((300, 1, 150), (300, 500, 100), 2, 2, 64, dtype=BF16)
    call = paged(shape, 32)
    check(call, shape, monkeypatch, causal=causal, window=window)


@NEEDS_COMPILER
@pytest.mark.parametrize("page_size", [16, 9])
def test_keys_before_a_window_are_not_read(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((40,), (500,), 2, 1, 64, dtype=BF16)
    call = paged(shape, page_size)
    expected = attend(call, monkeypatch, window=(30, 0), **bounds(shape))
    # The first row stands at position 460, so that no key before 430 is seen: pages that end before it are given back.
    freed = call["block_table"][0, : 430 // page_size]
    call["key"][freed.long()] = NAN
    call["value"][freed.long()] = NAN
    call["value"][call["block_table"][0, 430 // page_size].long(), : 430 % page_size] = NAN
    call["block_table"][0, : 430 // page_size] = 1 << 30
    again = attend(call, monkeypatch, window=(30, 0), **bounds(shape))
    assert torch.equal(expected[0], again[0])
    assert torch.equal(expected[1], again[1])


@NEEDS_COMPILER
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_sinks_and_caps(softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((70, 2), (140, 1), 8, 2, 64, dtype=BF16)
    call = packed(shape, spare_rows=3)
    call["sinks"] = torch.tensor([0.0, 1.0, -float("inf"), 30.0, -5.0, 2.0, 0.5, 100.0])
    check(call, shape, monkeypatch, softcap=softcap)


@NEEDS_COMPILER
def test_scores_that_outgrow_their_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block's largest score is far above the block's before it, which comes after it."""
    shape = Shape((64,), (700,), 1, 1, 64, dtype=BF16)
    call = packed(shape)
    call["query"] = call["query"].abs()
    call["key"] *= (700 - torch.arange(700))[:, None, None].to(BF16) / 20
    check(call, shape, monkeypatch)
    check(call, shape, monkeypatch, softcap=40.0)


@NEEDS_COMPILER
def test_many_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a warp counts at a time; of many classes."""
    queries = tuple((7 * i) % 40 for i in range(70))
    keys = tuple(queries[i] + (i * i * 13) % 90 * (i % 3) for i in range(70))
    shape = Shape(queries, keys, 2, 1, 64, dtype=BF16)
    check(packed(shape, spare_rows=200), shape, monkeypatch)


@NEEDS_COMPILER
def test_short_sequences_come_in_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one that is too long for that and some of a single tile; in two groups that a warp counts at a time."""
    queries = (140, 0, 150, 130, 129, 20) + (1,) * 28 + (131,)
    keys = (300, 9, 700, 2100, 129, 20) + (5,) * 28 + (600,)
    shape = Shape(queries, keys, 4, 4, 64, dtype=BF16)
    call, given = packed(shape, spare_rows=140), bounds(shape)
    out, lse = attend(call, monkeypatch, section_mib=1, **given)
    assert_as_exact_as_pytorch(out, lse, call, **given)


@NEEDS_COMPILER
def test_no_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((), (), 2, 1, 64, dtype=BF16)
    check(packed(shape, spare_rows=4), shape, monkeypatch)


@NEEDS_COMPILER
def test_a_sequence_has_the_same_bits_whatever_is_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((70, 33, 5), (200, 140, 9), 2, 1, 64, dtype=BF16)
    call = packed(shape)
    call["query"][70:] *= 1000  # would outgrow every reference
    together, _ = attend(call, monkeypatch, **bounds(shape))
    alone = {
        "query": call["query"][:70],
        "key": call["key"][:200],
        "value": call["value"][:200],
        "cu_seqlens_q": torch.tensor([0, 70], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 200], dtype=torch.int32),
    }
    one, _ = attend(alone, monkeypatch, max_seqlen_q=70, max_seqlen_k=200)
    assert torch.equal(one, together[:70])


@NEEDS_COMPILER
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_any_lengths(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    lengths = st.lists(st.integers(0, 300), min_size=count, max_size=count)
    shape = Shape(tuple(data.draw(lengths)), tuple(data.draw(lengths)), 2, 1, 64, dtype=BF16)
    causal = data.draw(st.booleans())
    window = data.draw(st.sampled_from([(-1, -1), (0, 0), (40, 7), (150, -1)]))
    with pytest.MonkeyPatch.context() as monkeypatch:
        check(paged(shape, 16, spare_rows=1), shape, monkeypatch, causal=causal, window=window)


def problem(**changes: Any) -> Any:
    usual: dict[str, Any] = {
        "queries": (200,),
        "keys": (200,),
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 128,
        "dtype": BF16,
    }
    return problem_of(packed(Shape(**{**usual, **changes})))


def test_it_is_for_hopper_and_sixteen_bits() -> None:
    assert hopper.why_not(problem(), H200, 255) is None
    assert "needs sm_90" in str(hopper.why_not(problem(), L4, 255))
    assert "does not take" in str(hopper.why_not(problem(dtype=torch.float32), H200, 255))
    assert "at most 256" in str(hopper.why_not(problem(head_dim=320), H200, 255))


@pytest.mark.parametrize("page_size", [1, 8, 48])
def test_it_takes_pages_of_any_size(page_size: int) -> None:
    shape = Shape((200,), (200,), 2, 2, 64, dtype=BF16)
    assert hopper.why_not(problem_of(paged(shape, page_size)), H200, 255) is None


def test_what_would_spill_over_small_pages_goes_elsewhere() -> None:
    call = paged(Shape((200,), (200,), 2, 2, 256, dtype=BF16), 1)
    assert hopper.why_not(problem_of(call), H200, 255) is None
    for options in ({"causal": False}, {"window": (100, 0)}, {"chunk": 128}):
        assert "at most 128" in str(hopper.why_not(problem_of(call, **options), H200, 255))
    mla = paged(Shape((200,), (200,), 2, 2, 192, 128, dtype=BF16), 1)
    assert hopper.why_not(problem_of(mla), H200, 255) is None
    assert (
        hopper.why_not(problem_of(paged(Shape((9,), (9,), head_dim=128, dtype=BF16), 1)), H200, 255) is None
    )


def test_split_keys_take_one_tile_for_all_batches() -> None:
    call = packed(Shape((200,), (200,), 8, 2, 64, dtype=BF16))
    assert hopper.why_not(problem_of(call, split_keys=256), H200, 255) is None


def test_an_expanded_dimension_has_no_tensor_map() -> None:
    call = packed(Shape((200,), (200,), 8, 2, 128, dtype=BF16))
    call["value"] = call["value"][:, :1].expand(-1, 2, -1)
    assert "expanded" in str(hopper.why_not(problem_of(call), H200, 255))


@NEEDS_COMPILER
def test_rows_of_an_expanded_dimension_can_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((70, 3), (140, 20), 4, 2, 64, dtype=BF16)
    call = paged(shape, 1)
    call["value"] = call["value"][:, :, :1].expand(-1, -1, 2, -1)
    check(call, shape, monkeypatch)
    call["query"] = call["query"][:, :1].expand(-1, 4, -1)
    assert "expanded" in str(hopper.why_not(problem_of(call), H200, 255))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"), [(8, 2, 4), (6, 2, 1), (5, 5, 1), (128, 1, 1), (64, 1, 64)]
)
def test_heads_share_a_tile_where_they_divide_its_rows(heads: int, kv_heads: int, expected: int) -> None:
    assert hopper.heads_of_tile(problem(heads=heads, kv_heads=kv_heads)) == expected


@pytest.mark.parametrize(
    ("page_size", "rows"), [(1, 1), (4, 1), (24, 8), (16, 16), (48, 16), (64, 64), (256, 128), (544, 32)]
)
def test_a_box_lies_in_one_page(page_size: int, rows: int) -> None:
    shape = Shape((200,), (200,), 2, 2, 64, dtype=BF16)
    assert hopper.features(problem_of(paged(shape, page_size))).page_rows == rows
    blocks_of_96 = Shape((200,), (200,), 2, 2, 192, dtype=BF16)
    assert hopper.features(problem_of(paged(blocks_of_96, 12))).page_rows == 1
    assert hopper.features(problem_of(paged(blocks_of_96, 24))).page_rows == 24


@pytest.mark.parametrize("pair", configs.DIMENSIONS)
def test_every_tile_fits_shared_memory(pair: tuple[int, int]) -> None:
    for wide in (False, True):
        tile = tile_of(problem(head_dim=pair[0], value_dim=pair[1]), wide)
        assert tile.shared_bytes <= limits("sm_90").shared_per_block


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, marks=[] if pair in ((128, 128), (256, 256)) else [pytest.mark.slow])
        for pair in configs.DIMENSIONS
    ],
)
def test_common_kernels_keep_everything_in_registers(pair: tuple[int, int], nvrtc: None) -> None:
    from flashmoe_science.jit.nvrtc import compile_kernel

    tile = tile_of(problem(head_dim=pair[0], value_dim=pair[1]))
    compile_kernel(hopper.kernel(tile, BF16))


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*configs.DIMENSIONS, (128, 256), (136, 136)])
@pytest.mark.parametrize("page_size", [1, 8, 12])
def test_no_kernel_over_small_pages_spills(page_size: int, pair: tuple[int, int], nvrtc: None) -> None:
    from flashmoe_science.jit.nvrtc import compile_kernel

    shape = Shape((200,), (200,), 2, 2, *pair, BF16)
    tree = torch.ones(200, dtype=torch.int64)
    for options in (
        *map(dict, SPILL_OPTIONS),
        *({"causal": causal, "tree": True} for causal in (True, False)),
    ):
        call = paged(shape, page_size)
        if options.pop("tree", False):
            call["tree_mask"] = tree
        given = problem_of(call, **options)
        if hopper.why_not(given, H200, 255) is None:
            for wide in (False, True):
                compile_kernel(hopper.kernel(tile_of(given, wide), BF16))
