"""The Hopper kernel for decode steps without a GPU: its own source, compiled as C++, against float64."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from emulated import NEEDS_COMPILER
from emulated_decode import inputs_of, options, run_on_cpu
from emulated_decode_hopper import attend
from emulated_launches import EmulatedMap
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from varlen_cases import Shape, bounds, drawn, packed, paged
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science.configs.attention import decode_hopper as configs
from flashmoe_science.cuda.varlen import decode_hopper, key_maps
from flashmoe_science.cuda.varlen.key_maps import KeyMaps
from flashmoe_science.cuda.varlen.kind import VarlenKernel
from flashmoe_science.cuda.varlen.prepare import first_of
from flashmoe_science.errors import KernelDefectError
from flashmoe_science.jit.limits import check_block
from flashmoe_science.jit.nvrtc import compile_kernel
from flashmoe_science.varlen.arguments import check
from flashmoe_science.varlen.problem import Repeatable, Sizes, Tensors
from problems import H200

ONE_TOKEN = Shape(
    (1, 1, 1, 1, 1), (300, 1, 0, 129, 16), heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16
)


def assert_right(
    shape: Shape,
    call: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    grid: int = 3,
    team: int = 1,
    parts: int = 1,
    **changes: Any,
) -> None:
    most = tuple(bounds(shape).values())
    out, lse = attend(call, options(**changes), most, monkeypatch, grid, team, parts)
    assert_as_exact_as_pytorch(out, lse, call, **{**bounds(shape), **changes})


@NEEDS_COMPILER
@pytest.mark.parametrize(("queries", "heads"), [(5, 8), (8, 8), (8, 16)])
@pytest.mark.parametrize("grid", [7, 11, 16])
def test_blocks_that_share_a_set_finish_it_together(
    grid: int, queries: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape((queries,), (1100,), heads, 2, 64, dtype=torch.bfloat16)
    call, most = paged(shape, 64), tuple(bounds(shape).values())
    alone = attend(call, options(), most, monkeypatch, grid)
    together = attend(call, options(), most, monkeypatch, grid, at_a_time=grid)
    assert_as_exact_as_pytorch(*together, call, **bounds(shape))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    ("sets", "rows", "expected"),
    [(8, 32, True), (8, 16, False), (4, 32, False), (5, 32, True), (17, 32, False)],
)
def test_which_sets_blocks_finish_together(sets: int, rows: int, expected: bool) -> None:
    """Of 8 to 32 blocks each; more than 16 rows."""
    assert configs.finish_together(sets, rows, H200.multiprocessors) == expected


@NEEDS_COMPILER
@pytest.mark.parametrize(("team", "grid"), [(1, 21), (2, 40), (4, 40)])
@pytest.mark.parametrize("at_a_time", [3, 5, 16])
def test_blocks_finish_a_set_of_which_some_come_later(
    at_a_time: int, team: int, grid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets meet within a block's share, too, and a second launch finds what the first one left."""
    shape = Shape((6, 5), (1500, 900), 16, 4, 64, dtype=torch.bfloat16)
    call, most = paged(shape, 64), tuple(bounds(shape).values())
    alone = attend(call, options(), most, monkeypatch, grid, team)
    together = attend(call, options(), most, monkeypatch, grid, team, at_a_time=at_a_time, launches=2)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@NEEDS_COMPILER
@pytest.mark.parametrize("grid", [1, 3, 16])
@pytest.mark.parametrize("page_size", [0, 1, 5, 8, 16, 24, 48, 64, 256])
def test_one_token_of_each_sequence(page_size: int, grid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = paged(ONE_TOKEN, page_size) if page_size else packed(ONE_TOKEN, spare_keys=3)
    assert_right(ONE_TOKEN, call, monkeypatch, grid)


@NEEDS_COMPILER
@pytest.mark.parametrize("page_size", [5, 32])
@pytest.mark.parametrize("layout", ["HND", "joint", "interleaved", "values in another order"])
def test_any_strides(layout: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = paged(ONE_TOKEN, page_size, layout="NHD" if layout.startswith("values") else layout)
    if layout.startswith("values"):
        call["value"] = call["value"].transpose(1, 2).contiguous().transpose(1, 2)
    assert_right(ONE_TOKEN, call, monkeypatch)


@NEEDS_COMPILER
@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_more_than_4_gib_apart(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody touches is not taken."""
    shape = Shape((1,), (3 * page_size,), 4, 2, 64, dtype=torch.bfloat16)
    call, apart = paged(shape, page_size, spare_pages=0), (1 << 31) + 1024
    for name in ("key", "value"):
        page = call[name][0].numel()
        far = torch.empty(2 * apart + page, dtype=torch.bfloat16)
        cache = far.as_strided(call[name].shape, (apart, *call[name].stride()[1:]))
        call[name] = cache.copy_(call[name])
    assert_right(shape, call, monkeypatch, 2)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "heads", "queries", "dtype"),
    [
        (64, 64, 16, 2, torch.bfloat16),
        (128, 128, 8, 1, torch.bfloat16),
        (128, 128, 8, 8, torch.float16),
        (128, 64, 6, 5, torch.bfloat16),
        (64, 128, 16, 8, torch.float16),
        (128, 128, 20, 8, torch.bfloat16),
    ],
)
def test_dims_heads_and_rows(
    head_dim: int,
    value_dim: int,
    heads: int,
    queries: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last has 80 rows, which are two sets."""
    shape = Shape((queries, queries, 1), (700, 7, 33), heads, 2, head_dim, value_dim, dtype)
    for page_size in (16, 1):
        assert_right(shape, paged(shape, page_size, spare_rows=2), monkeypatch, 4, team=2)


@NEEDS_COMPILER
def test_more_tiles_than_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies come late and in any order."""
    shape = Shape((4, 4), (3000, 1500), 8, 2, 128, 128, torch.bfloat16)
    for page_size in (64, 1):
        assert_right(shape, paged(shape, page_size), monkeypatch, 2)


@NEEDS_COMPILER
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("grid", [1, 2, 5, 8])
def test_a_cluster_goes_through_a_segment_together(
    grid: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets of one cluster, of several, and several of one; parts that have no keys."""
    for queries, keys in ((2, (900, 700)), (1, (3000, 20, 64)), (8, (1, 2, 65, 8, 500))):
        shape = Shape((queries,) * len(keys), keys, 8, 2, 64, 64, torch.bfloat16)
        for page_size in (16, 3):
            assert_right(shape, paged(shape, page_size), monkeypatch, grid, parts=parts)


@NEEDS_COMPILER
@pytest.mark.parametrize("kernel", ["decode", "decode_hopper"])
def test_a_query_at_a_multiple_of_4_gib(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of its address is zero."""
    shape = Shape((2,), (300,), 4, 2, 128, 128, torch.bfloat16)
    call = paged(shape, 16)
    with mapped_at(0x5000_0000_0000, call["query"]) as query:
        moved = {**call, "query": query}
        most = tuple(bounds(shape).values())
        if kernel == "decode":
            result = run_on_cpu(moved, options(), most)
        else:
            result = attend(moved, options(), most, monkeypatch)
        assert_as_exact_as_pytorch(*result, call, **bounds(shape))


@contextmanager
def mapped_at(address: int, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A copy in memory that begins there."""
    size = tensor.numel() * tensor.element_size()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != address:
        pytest.skip("the system has other memory there")
    try:
        memory = (ctypes.c_char * size).from_address(address)
        yield torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
    finally:
        libc.munmap(address, size)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 400)), min_size=0, max_size=40),
    page_size=st.sampled_from([0, 1, 16, 24, 64, 80]),
    grid=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (4, 2), (2, 1), (12, 1)]),
    causal=st.booleans(),
    window=st.sampled_from([(-1, -1), (0, 0), (3, -1), (40, 2), (130, 5), (-1, 7)]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    extras=st.sampled_from([(), ("sinks",), ("sinks", "rows")]),
    parts=st.sampled_from([1, 1, 2, 4]),
    split_keys=st.sampled_from([None, None, 128]),
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
    parts: int,
    split_keys: int | None,
    data: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries, keys = zip(*lengths, strict=True) if lengths else ((), ())
    shape = Shape(queries, keys, *heads, 64, dtype=torch.bfloat16)
    call = drawn(shape, page_size, data, extras)
    chosen = {"causal": causal, "window": window, "softcap": softcap, "split_keys": split_keys}
    parts = 1 if heads[0] > 8 or split_keys else parts
    out, lse = attend(call, options(**chosen), (4, 400), monkeypatch, grid, parts=parts)
    assert_as_exact_as_pytorch(out, lse, call, **{**bounds(shape), **chosen})


@NEEDS_COMPILER
@pytest.mark.parametrize(("dim", "queries"), [(64, 1), (128, 1), (128, 8)])
def test_with_split_keys_a_block_and_many_add_parts_alike(
    dim: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a block has of a set alone meets part by part in slots that it uses again; what blocks share, at the end."""
    keys = (2000, 8500, 130, 4300)
    shape = Shape((queries,) * len(keys), keys, 4, 2, dim, dtype=torch.bfloat16)
    call = paged(shape, 16)
    chosen, most = options(split_keys=128), (queries, 8500)
    out, lse = attend(call, chosen, most, monkeypatch, 1)
    assert_as_exact_as_pytorch(out, lse, call, **bounds(shape), split_keys=128)
    for grid, team in ((2, 2), (3, 1), (80, 1), (200, 2)):
        again = attend(call, chosen, most, monkeypatch, grid, team)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


@NEEDS_COMPILER
@pytest.mark.parametrize("page_size", [1, 16])
def test_with_split_keys_the_bits_depend_on_the_sequence_alone(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces with an odd number of tiles before it are nothing to a sequence."""
    keys = (700, 128, 3, 4500, 1000)
    shape = Shape((4,) * 5, keys, 8, 1, 64, dtype=torch.bfloat16)
    chosen = options(split_keys=256)
    together = paged(shape, page_size)
    out, lse = attend(together, chosen, (4, 4500), monkeypatch, 7)
    assert_as_exact_as_pytorch(out, lse, together, **bounds(shape), split_keys=256)
    for grid in (1, 4, 50):
        again = attend(together, chosen, (4, 4500), monkeypatch, grid)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
    for index in range(5):
        rows = slice(4 * index, 4 * (index + 1))
        alone = {
            **together,
            "query": together["query"][rows].contiguous(),
            "cu_seqlens_q": together["cu_seqlens_q"][:2],
            "block_table": together["block_table"][index : index + 1],
            "seqused_k": together["seqused_k"][index : index + 1],
        }
        by_itself = attend(alone, chosen, (4, keys[index]), monkeypatch, 3)
        assert torch.equal(by_itself[0], out[rows])
        assert torch.equal(by_itself[1], lse[rows])


@NEEDS_COMPILER
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("split_keys", [None, 128])
def test_keys_that_no_row_sees_have_no_effect(
    split_keys: int | None, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape((2, 1), (300, 90), 4, 2, 64, dtype=torch.bfloat16)
    clean = paged(shape, page_size)
    chosen = options(window=(20, 0), split_keys=split_keys)
    expected = attend(clean, chosen, (2, 300), monkeypatch)
    dirty = {name: tensor.clone() for name, tensor in clean.items()}
    for index, (queries, keys) in enumerate(zip(shape.queries, shape.keys, strict=True)):
        hidden = torch.arange(keys - queries - 20)
        page = clean["block_table"][index].long()[hidden // page_size]
        dirty["key"][page, hidden % page_size] = torch.nan
        dirty["value"][page, hidden % page_size] = torch.inf
        dirty["block_table"][index, : len(hidden) // page_size] = (
            1 << 30
        )  # pages that the window has left behind
    for given_, wanted in zip(attend(dirty, chosen, (2, 300), monkeypatch), expected, strict=True):
        assert torch.equal(given_, wanted)


@given(
    dims=st.tuples(*(st.sampled_from(configs.DIMENSIONS),) * 2),
    rows=st.integers(1, 200),
    page_size=st.integers(0, 1024),
)
def test_what_is_chosen_fits(dims: tuple[int, int], rows: int, page_size: int) -> None:
    chosen = configs.configuration(*dims, rows, page_size)
    check_block("decode_hopper", "sm_90", chosen.threads, chosen.shared_bytes)
    assert chosen.rows >= min(rows, configs.PRODUCT_ROWS)
    assert chosen.stages >= 4
    assert chosen.quads <= configs.MOST_QUADS
    assert chosen.gathered or chosen.box_rows % 8 == 0


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("rows", [4, 16, 32, 64])
def test_the_largest_kernels_compile_without_spills(rows: int) -> None:
    for softcap, page_size in itertools.product((False, True), (16, 1)):
        chosen = configs.configuration(128, 128, rows, page_size, softcap=softcap, chunk=True)
        compile_kernel(decode_hopper.kernel(chosen, torch.bfloat16))
        if rows <= 32:
            compile_kernel(decode_hopper.kernel(dataclasses.replace(chosen, parts=2), torch.bfloat16))


def test_what_it_cannot_do_is_said() -> None:
    problem = check(inputs_of(paged(ONE_TOKEN, 16)), options())
    assert decode_hopper.why_not(problem, H200, 1) is None
    for change, reason in (
        ({"dtype": torch.float32}, "does not take torch.float32"),
        ({"head_dim": 96}, "are 64 or 128"),
        ({"alibi": True}, "ALiBi"),
        ({"tree": True}, "trees"),
        ({"num_heads": 256}, "up to 64 rows"),
        ({"key_strides": (4096, 68, 64)}, "multiples of 16 bytes"),
        ({"value_strides": (4096, 0, 64)}, "expanded"),
        ({"key_strides": (0, 1 << 31, 64)}, "too far apart"),
    ):
        assert reason in str(decode_hopper.why_not(dataclasses.replace(problem, **change), H200, 1))
    assert "few queries" in str(decode_hopper.why_not(problem, H200, 31))


@pytest.mark.parametrize(("sets", "parts"), [(1, 1), (33, 1), (34, 2), (64, 2), (66, 2), (67, 1), (512, 1)])
def test_clusters_of_two_where_so_many_blocks_have_a_set(sets: int, parts: int) -> None:
    assert configs.parts_for(sets, 32, H200.multiprocessors) == parts
    assert configs.parts_for(sets, 33, H200.multiprocessors) == 1


def test_where_the_compiler_spills_another_kernel_takes_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def spilt(*given: object, **options: object) -> None:
        raise KernelDefectError("attention_decode_hopper spills 8 bytes")

    monkeypatch.setattr(decode_hopper, "load", spilt)
    monkeypatch.setattr(decode_hopper, "is_capturing", lambda: False)
    problem = check(inputs_of(paged(ONE_TOKEN, 16)), options())
    kinds = [VarlenKernel.DECODE_HOPPER, VarlenKernel.DECODE]
    with pytest.warns(RuntimeWarning, match="spills 8 bytes; taking another kernel"):
        assert isinstance(first_of(kinds, problem, H200, 1), Repeatable)


def test_an_address_in_a_map_is_looked_for_in_the_map_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_maps, "TensorMap", EmulatedMap)
    call = paged(ONE_TOKEN, 16)
    problem = check(inputs_of(call), options())
    buffer = (ctypes.c_char * decode_hopper.ARGUMENT_BYTES)()
    configuration = decode_hopper.configuration_for(problem, Sizes(5, 1, 300), H200)
    maps = KeyMaps(buffer, 0, problem, configuration.box_rows)
    assert not maps.have_addresses_at(0)
    given_ = (call.get(name) for name in Tensors._fields[5:])
    maps.describe(Tensors(call["query"], call["key"], call["value"], call["query"], None, *given_))  # type: ignore[arg-type]
    assert maps.have_addresses_at(0)
    assert not maps.have_addresses_at(8)
