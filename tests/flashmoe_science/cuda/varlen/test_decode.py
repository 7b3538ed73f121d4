"""The decode kernel without a GPU: its own source, compiled as C++ (../../emulated.py), against float64."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import pytest
import torch
from emulated import NEEDS_COMPILER, compile_emulation
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import H200
from varlen_cases import Call, Shape, bounds, packed, paged
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science.configs.attention import decode as configs
from flashmoe_science.configs.attention.decode import DecodeConfiguration, Pages
from flashmoe_science.cuda.varlen import decode
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import LIMITS, check_block
from flashmoe_science.jit.nvrtc import compile_kernel
from flashmoe_science.varlen.arguments import Inputs, Options, check, check_sizes
from flashmoe_science.varlen.problem import Sizes, Tensors

ONE_TOKEN = Shape(
    (1, 1, 1, 1, 1), (300, 1, 0, 129, 16), heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16
)


@functools.cache
def library(configuration: DecodeConfiguration, dtype: torch.dtype) -> ctypes.CDLL:
    return compile_emulation(decode.kernel(configuration, dtype, "sm_90"), "Parameters")


def inputs_of(call: Call) -> Inputs:
    return Inputs(*(call.get(name) for name in Inputs._fields))  # type: ignore[arg-type]


def run_on_cpu(
    call: Call, options: Options, sizes: tuple[int, int], grid: int = 3, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of the emulated kernel with a grid of so many blocks; both begin as NaN."""
    inputs = inputs_of(call)
    problem = check(inputs, options)
    checked = check_sizes(inputs, *sizes)
    configuration = dataclasses.replace(decode.configuration_for(problem, checked, H200), **changes)
    shape = (*call["query"].shape[:2], call["value"].shape[-1])
    output = torch.full(shape, torch.nan, dtype=problem.dtype)
    lse = torch.full(shape[:2], torch.nan)
    workspace = torch.full((decode.workspace_bytes(problem, checked, configuration, grid) // 4,), torch.nan)
    arrivals = torch.zeros(decode.arrival_counters(grid, configuration), dtype=torch.int32)
    buffer = ctypes.create_string_buffer(decode.ARGUMENT_BYTES)
    decode.write_plan(buffer, problem)
    tensors = Tensors(
        call["query"],
        call["key"],
        call["value"],
        output,
        lse,
        *(call.get(n) for n in Tensors._fields[5:]),  # type: ignore[arg-type]
    )
    decode.write_call(buffer, tensors, checked, workspace.data_ptr(), arrivals.data_ptr())
    library(configuration, problem.dtype).run(buffer, grid)
    assert not arrivals.any(), "counters are zero after a launch"
    return output, lse


def options(**changes: Any) -> Options:
    return Options(True, (-1, -1), 0.0, None, None, True)._replace(**changes)


@NEEDS_COMPILER
@pytest.mark.parametrize("grid", [1, 3, 16])
@pytest.mark.parametrize("page_size", [0, 1, 16, 48])
def test_one_token_of_each_sequence(page_size: int, grid: int) -> None:
    call = paged(ONE_TOKEN, page_size) if page_size else packed(ONE_TOKEN)
    out, lse = run_on_cpu(call, options(), tuple(bounds(ONE_TOKEN).values()), grid)
    assert_as_exact_as_pytorch(out, lse, call, **bounds(ONE_TOKEN))


@NEEDS_COMPILER
@pytest.mark.parametrize("layout", ["HND", "joint", "interleaved"])
def test_any_strides(layout: str) -> None:
    call = paged(ONE_TOKEN, 32, layout=layout)
    out, lse = run_on_cpu(call, options(), tuple(bounds(ONE_TOKEN).values()))
    assert_as_exact_as_pytorch(out, lse, call, **bounds(ONE_TOKEN))


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "heads", "queries", "dtype"),
    [
        (64, 64, 16, 2, torch.bfloat16),
        (128, 128, 8, 1, torch.bfloat16),
        (128, 128, 8, 8, torch.float16),
        (256, 256, 4, 4, torch.bfloat16),
        (96, 64, 2, 3, torch.bfloat16),
        (40, 72, 6, 5, torch.bfloat16),
    ],
)
def test_dims_heads_and_rows(
    head_dim: int, value_dim: int, heads: int, queries: int, dtype: torch.dtype
) -> None:
    shape = Shape((queries, queries, 1), (200, 7, 33), heads, 2, head_dim, value_dim, dtype)
    call = paged(shape, 16, spare_rows=2)
    out, lse = run_on_cpu(call, options(), tuple(bounds(shape).values()), 4)
    assert_as_exact_as_pytorch(out, lse, call, **bounds(shape))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 400)), min_size=0, max_size=40),
    page_size=st.sampled_from([0, 1, 5, 16, 64]),
    grid=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (4, 2), (2, 1)]),
    causal=st.booleans(),
    window=st.sampled_from([(-1, -1), (0, 0), (3, -1), (40, 2), (130, 5), (-1, 7)]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    extras=st.sampled_from([(), ("sinks",), ("slopes",), ("slopes", "sinks", "rows")]),
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
    split_keys: int | None,
    data: int,
) -> None:
    queries, keys = zip(*lengths, strict=True) if lengths else ((), ())
    shape = Shape(queries, keys, *heads, 32, dtype=torch.bfloat16)
    spare = 3 if "rows" in extras else 0
    call = (
        paged(shape, page_size, data, spare_rows=spare, garbage=1 << 30)
        if page_size
        else packed(shape, data, spare_rows=spare, spare_keys=spare)
    )
    generator = torch.Generator().manual_seed(data)
    if "sinks" in extras:
        call["sinks"] = 3 * torch.randn(heads[0], generator=generator)
        call["sinks"][0] = -torch.inf
    if "slopes" in extras:
        call["alibi_slopes"] = torch.rand(len(keys), heads[0], generator=generator)
    chosen = {"causal": causal, "window": window, "softcap": softcap, "split_keys": split_keys}
    out, lse = run_on_cpu(call, options(**chosen), (4, 400), grid)
    assert_as_exact_as_pytorch(out, lse, call, **{**bounds(shape), **chosen})


@NEEDS_COMPILER
def test_keys_that_no_row_sees_have_no_effect() -> None:
    shape = Shape((2, 1), (300, 90), 4, 2, 32, dtype=torch.bfloat16)
    clean = paged(shape, 16)
    chosen = options(window=(20, 0))
    expected = run_on_cpu(clean, chosen, (2, 300))
    dirty = {name: tensor.clone() for name, tensor in clean.items()}
    for index, (queries, keys) in enumerate(zip(shape.queries, shape.keys, strict=True)):
        hidden = torch.arange(keys - queries - 20)
        page = clean["block_table"][index].long()[hidden // 16]
        dirty["key"][page, hidden % 16] = torch.nan
        dirty["value"][page, hidden % 16] = torch.inf
        dirty["block_table"][index, : len(hidden) // 16] = -1  # pages that the window has left behind
    for given_, wanted in zip(run_on_cpu(dirty, chosen, (2, 300)), expected, strict=True):
        assert torch.equal(given_, wanted)


@NEEDS_COMPILER
@pytest.mark.parametrize("queries", [1, 3])
def test_with_split_keys_the_bits_depend_on_the_sequence_alone(queries: int) -> None:
    shape = Shape((queries,) * 5, (700, 128, 3, 400, 1000), 4, 2, 32, dtype=torch.bfloat16)
    chosen = options(split_keys=256)
    together = paged(shape, 16)
    out, lse = run_on_cpu(together, chosen, (queries, 1000), 7)
    for grid in (1, 4, 50):
        again = run_on_cpu(together, chosen, (queries, 1000), grid)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
    for index in range(5):
        rows = slice(queries * index, queries * (index + 1))
        alone = {
            **together,
            "query": together["query"][rows].contiguous(),
            "cu_seqlens_q": together["cu_seqlens_q"][:2],
            "block_table": together["block_table"][index : index + 1],
            "seqused_k": together["seqused_k"][index : index + 1],
        }
        own = run_on_cpu(alone, chosen, (queries, 1000), 5)
        assert torch.equal(own[0], out[rows])
        assert torch.equal(own[1], lse[rows])


ARCHITECTURES = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_120")


@given(
    architecture=st.sampled_from(sorted(LIMITS)),
    dims=st.tuples(st.integers(1, 32), st.integers(1, 32)),
    rows=st.integers(1, 64),
    pages=st.sampled_from(Pages),
)
def test_what_is_chosen_fits(architecture: str, dims: tuple[int, int], rows: int, pages: Pages) -> None:
    head_dim, value_dim = (8 * dim for dim in dims)
    chosen = configs.configuration(architecture, head_dim, value_dim, rows, pages, False)
    check_block(chosen.label, architecture, chosen.threads, chosen.shared_bytes)
    assert chosen.rows >= min(rows, 8)
    assert chosen.rows <= configs.most_rows(max(head_dim, value_dim), pages, False)
    assert decode.arrival_counters(H200.multiprocessors, chosen) <= configs.MOST_ARRIVALS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.usefixtures("nvrtc")
def test_the_largest_kernels_compile_without_spills(architecture: str) -> None:
    dtype = torch.float16 if architecture == "sm_75" else torch.bfloat16
    for dim, rows, pages, score_changes in (
        (64, 32, Pages.ROWS, True),
        (128, 8, Pages.ROWS, True),
        (128, 32 if architecture == "sm_90" else 16, Pages.TILES, False),
        (256, 8, Pages.TILES, False),
    ):
        if (architecture, dim) == ("sm_120", 256):
            continue  # 12 bytes; the kernel is taken all the same
        chosen = configs.configuration(architecture, dim, dim, rows, pages, score_changes)
        compile_kernel(decode.kernel(chosen, dtype, architecture))


def test_what_it_cannot_do_is_said() -> None:
    problem = check(inputs_of(paged(ONE_TOKEN, 16)), options())
    assert decode.why_not(problem, H200, 1) is None
    for change, reason in (
        ({"dtype": torch.float32}, "does not take torch.float32"),
        ({"head_dim": 576}, "at most 256"),
        ({"key_strides": (4096, 68, 64)}, "multiples of 16 bytes"),
        ({"value_strides": (4096, 1 << 31, 64)}, "too far apart"),
    ):
        assert reason in str(decode.why_not(dataclasses.replace(problem, **change), H200, 1))


def test_the_workspace_depends_on_no_length_unless_keys_are_split() -> None:
    problem = check(inputs_of(paged(ONE_TOKEN, 16)), options())
    configuration = decode.configuration_for(problem, Sizes(5, 1, 300), H200)
    sizes = [Sizes(1, 1, 1), Sizes(4096, 1, 1 << 20)]
    assert len({decode.workspace_bytes(problem, size, configuration, 132) for size in sizes}) == 1
    split = dataclasses.replace(problem, split_keys=128)
    with pytest.raises(InputError, match="give a larger split_keys"):
        decode.workspace_bytes(split, sizes[1], configuration, 132)


@pytest.mark.parametrize(
    ("heads", "most_queries", "taken"),
    [
        (4, 1, True),
        (4, 15, True),
        (4, 31, False),
        (64, 1, True),
        (64, 3, False),
        (16, 7, True),
        (16, 15, False),
    ],
)
def test_few_rows_are_what_it_is_for(heads: int, most_queries: int, taken: bool) -> None:
    problem = dataclasses.replace(check(inputs_of(paged(ONE_TOKEN, 16)), options()), num_heads=heads)
    assert (decode.why_not(problem, H200, most_queries) is None) == taken


@NEEDS_COMPILER
@pytest.mark.parametrize("split_keys", [None, 128])
@pytest.mark.parametrize("grid", [33, 40, 70])
def test_many_pieces_meet(grid: int, split_keys: int | None) -> None:
    shape = Shape((1, 1), (5000, 4800), 1, 1, 32, dtype=torch.bfloat16)
    call = paged(shape, 16)
    out, lse = run_on_cpu(call, options(split_keys=split_keys), (1, 5000), grid)
    assert_as_exact_as_pytorch(out, lse, call, **bounds(shape))
