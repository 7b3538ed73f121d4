"""The decode kernel without a GPU: its own source, compiled as C++ (../../emulated.py), against float64."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import emulated_decode
import pytest
import torch
from compiled_for import each_architecture
from emulated import NEEDS_COMPILER, compile_emulation
from emulated_decode import inputs_of, options, run_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from varlen_cases import Shape, bounds, drawn, packed, paged
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science.configs.attention import decode as configs
from flashmoe_science.configs.attention import decode_hopper
from flashmoe_science.configs.attention.decode import DecodeConfiguration, Pages
from flashmoe_science.cuda import tickets
from flashmoe_science.cuda.tickets import TicketPool
from flashmoe_science.cuda.varlen import decode, decode_calls, decode_workspace
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import LIMITS, check_block, limits
from flashmoe_science.jit.nvrtc import compile_kernel
from flashmoe_science.varlen.arguments import Inputs, check
from flashmoe_science.varlen.problem import REPEATED, Repeatable, Sizes, Tensors
from problems import H200

ONE_TOKEN = Shape(
    (1, 1, 1, 1, 1), (300, 1, 0, 129, 16), heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16
)


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
    call = drawn(shape, page_size, data, extras)
    generator = torch.Generator().manual_seed(data)
    if "slopes" in extras:
        call["alibi_slopes"] = torch.rand(len(keys), heads[0], generator=generator)
    chosen = {"causal": causal, "window": window, "softcap": softcap, "split_keys": split_keys}
    out, lse = run_on_cpu(call, options(**chosen), (4, 400), grid)
    assert_as_exact_as_pytorch(out, lse, call, **{**bounds(shape), **chosen})


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 4), st.one_of(st.integers(0, 400), st.integers(0, 1500))), max_size=20
    ),
    page_size=st.sampled_from([0, 16, 48, 64]),
    blocks=st.integers(1, 12),
    shape_of=st.sampled_from([(8, 1, 3, 1), (8, 1, 2, 2), (8, 2, 2, 1), (4, 1, 2, 4)]),
    window=st.sampled_from([(-1, -1), (-1, -1), (3, -1), (130, 5)]),
    extras=st.sampled_from([(), ("sinks",), ("slopes", "rows")]),
    data=st.integers(0, 1000),
)
@NEEDS_COMPILER
def test_any_batch_by_way_of_shared_memory(
    lengths: list[tuple[int, int]],
    page_size: int,
    blocks: int,
    shape_of: tuple[int, int, int, int],
    window: tuple[int, int],
    extras: tuple[str, ...],
    data: int,
) -> None:
    queries, keys = zip(*lengths, strict=True) if lengths else ((), ())
    shape = Shape(queries, keys, 4, 2, 64, dtype=torch.bfloat16)
    call = drawn(shape, page_size, data, extras)
    if "slopes" in extras:
        call["alibi_slopes"] = torch.rand(len(keys), 4, generator=torch.Generator().manual_seed(data))
    warps, key_tiles, queue, cluster = shape_of
    changes = {"warps": warps, "key_tiles": key_tiles, "queue": queue, "cluster": cluster}
    out, lse = run_on_cpu(call, options(window=window), (4, 1500), blocks * cluster, **changes)
    assert_as_exact_as_pytorch(out, lse, call, **bounds(shape), window=window)


@NEEDS_COMPILER
@pytest.mark.parametrize("page_size", [0, 1, 16, 48])
@pytest.mark.parametrize("queries", [1, 2])
def test_parts_that_begin_where_a_window_hides_keys(queries: int, page_size: int) -> None:
    shape = Shape((queries,) * 4, (136, 138, 300, 20), 4, 2, 32, dtype=torch.bfloat16)
    call = paged(shape, page_size) if page_size else packed(shape)
    given_ = {"causal": False, "window": (40, 2), "split_keys": 128}
    out, lse = run_on_cpu(call, options(**given_), tuple(bounds(shape).values()), 5)
    assert_as_exact_as_pytorch(out, lse, call, **{**bounds(shape), **given_})


@NEEDS_COMPILER
@pytest.mark.parametrize("split_keys", [None, 128])
def test_keys_that_no_row_sees_have_no_effect(split_keys: int | None) -> None:
    shape = Shape((2, 1), (300, 90), 4, 2, 32, dtype=torch.bfloat16)
    clean = paged(shape, 16)
    chosen = options(window=(20, 0), split_keys=split_keys)
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
    assert decode_workspace.arrival_counters(H200.multiprocessors, chosen) <= configs.MOST_ARRIVALS


@each_architecture(ARCHITECTURES)
@pytest.mark.usefixtures("nvrtc")
def test_the_largest_kernels_compile_without_spills(architecture: str) -> None:
    dtype = torch.float16 if architecture == "sm_75" else torch.bfloat16
    for dim, rows, pages, score_changes in (
        (64, 32, Pages.ROWS, True),
        (64, 16, Pages.TILES, True),
        (64, 8, Pages.TILES, False),
        (128, 16, Pages.ROWS, True),
        (128, 32 if limits(architecture).shared_per_block > 160 << 10 else 16, Pages.TILES, False),
        (256, 8, Pages.TILES, False),
    ):
        if (architecture, dim) == ("sm_120", 256):
            continue  # 12 bytes; the kernel is taken all the same
        chosen = configs.configuration(architecture, dim, dim, rows, pages, score_changes)
        compile_kernel(decode.kernel(chosen, dtype, architecture))


def test_bounds_on_keys_of_every_size_are_like_some() -> None:
    for most in (0, 128, 129, 2048, 2049, 1 << 31, sys.maxsize):
        lengths = configs.lengths_like(most)
        assert most in lengths or most >= 1 << 31
        assert lengths.start <= most


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
    assert len({decode_workspace.workspace_bytes(problem, size, configuration, 132) for size in sizes}) == 1
    split = dataclasses.replace(problem, split_keys=128)
    with pytest.raises(InputError, match="give a larger split_keys"):
        decode_workspace.workspace_bytes(split, sizes[1], configuration, 132)


def test_launches_of_all_problems_share_the_workspace_of_a_stream() -> None:
    """Strides of a cache that grows are others at each step, so each step is a problem of its own."""
    sizes: list[int] = []

    def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        sizes.append(shape[0])
        return torch.empty_strided(shape, strides, dtype=dtype)

    grid, device = 3, 1 << 20  # which no other test has
    addresses = [
        decode_workspace.shared_workspace(allocate, device, stream, grid).data_ptr()
        for stream in (5, 5, 6, 5)
    ]
    assert len(set(addresses)) == len(sizes) == 2
    assert addresses[0] == addresses[1] == addresses[3]
    problem = check(inputs_of(paged(ONE_TOKEN, 16)), options())
    needed = [
        decode_workspace.workspace_bytes(
            problem,
            Sizes(1, 1, 1),
            configs.configuration(architecture, dim, dim, rows, pages, changes),
            grid,
        )
        for architecture in LIMITS
        for dim in range(8, configs.MOST_DIM + 1, 8)
        for rows in (1, 16, 32)
        for pages in Pages
        for changes in (False, True)
    ] + [
        decode_workspace.workspace_bytes(
            problem, Sizes(1, 1, 1), decode_hopper.configuration(dim, dim, rows, 16), grid
        )
        for dim in decode_hopper.DIMENSIONS
        for rows in (1, 16, 32, 64)
    ]
    assert max(needed) == sizes[0]


class EmulatedLauncher:
    """In the place of `cuda.launch.Launcher`: a launch runs the emulation."""

    def __init__(
        self, function: object, grid: tuple[int, int, int], compiled: Any, *_: int, **__: bool
    ) -> None:
        self.buffer = ctypes.create_string_buffer(decode_calls.ARGUMENT_BYTES)
        emulation = compile_emulation(compiled, "Parameters")
        self.config = SimpleNamespace(stream=0)
        self.twin = lambda: EmulatedLauncher(function, grid, compiled)

        def again() -> int:
            assert self.config.stream == 77
            emulation.run(self.buffer, grid[0])
            return 0

        def start(stream: int) -> None:
            self.config.stream = stream
            again()

        self.again, self.start = again, start


@NEEDS_COMPILER
@pytest.mark.parametrize("extras", ["", "sinks and slopes", "sinks and trees"])
@pytest.mark.parametrize("page_size", [0, 16])
def test_a_repeated_call_is_the_call(page_size: int, extras: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tensors of the same kind, by the way that knows all but their addresses."""
    pool = TicketPool(torch.zeros(configs.MOST_ARRIVALS * 8, dtype=torch.int32), configs.MOST_ARRIVALS)
    monkeypatch.setattr(decode, "Launcher", EmulatedLauncher)
    monkeypatch.setattr(decode, "load", lambda *arguments, **options: None)
    monkeypatch.setattr(decode, "decode_arrival_pool", lambda device: pool)
    for module in (decode, decode_calls):
        monkeypatch.setattr(module, "raw_stream", lambda device: 77)
    monkeypatch.setattr(
        decode_calls,
        "cuda_allocator",
        lambda: lambda *layout: torch.empty_strided(*layout[:2], dtype=layout[2]),
    )
    monkeypatch.setattr(decode_workspace, "_workspaces", decode_workspace._Workspaces())
    captured = [False]
    for module in (decode, decode_calls, tickets):
        monkeypatch.setattr(module, "is_capturing", lambda: captured[0])
    device = dataclasses.replace(H200, multiprocessors=4)
    calls = [paged(ONE_TOKEN, page_size, seed) if page_size else packed(ONE_TOKEN, seed) for seed in (0, 1)]
    for call, words in zip(calls, ([1, 0, 1, 0, 1], [0, 1, 1, 1, 0]), strict=True):
        if extras:
            call["sinks"] = torch.arange(4.0) - 2
        if extras == "sinks and slopes":
            call["alibi_slopes"] = torch.arange(20.0).view(5, 4) / 20
        if extras == "sinks and trees":
            call["tree_mask"] = torch.tensor(words)
    sizes = Sizes(5, *bounds(ONE_TOKEN).values())
    run = decode.prepare(check(inputs_of(calls[0]), options()), device, 1)
    assert isinstance(run, Repeatable)

    def results() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((5, 4, 64), torch.nan, dtype=torch.bfloat16), torch.full((5, 4), torch.nan)

    inputs = [inputs_of(call) for call in calls]
    out, lse = results()
    first = Tensors._make((*inputs[0][:3], out, lse, *inputs[0][3:9], *inputs[0][10:]))
    run(first, sizes)
    kinds = [run.repeat(first, sizes, own_output) for own_output in (False, True)]
    repeat, other = (kind.call for kind in kinds if kind is not None)
    for call, given_ in zip(calls, inputs, strict=True):
        for captured[0] in (False, False, True):
            again, again_lse = results()
            repeat(given_to_repeat(given_), again, again_lse)
            assert_as_exact_as_pytorch(again, again_lse, call, **bounds(ONE_TOKEN))
            again, again_lse = results()
            other(given_to_repeat(given_._replace(out=again)), again, again_lse)
            assert_as_exact_as_pytorch(again, again_lse, call, **bounds(ONE_TOKEN))
    captured[0] = False
    repeat(given_to_repeat(inputs[0]), *(again := results()))
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)
    shifted = inputs[0]._replace(query=torch.zeros(5 * 256 + 1, dtype=torch.bfloat16)[1:].view(5, 4, 64))
    with pytest.raises(InputError, match=r"pass a \.clone"):
        repeat(given_to_repeat(shifted), *results())


def given_to_repeat(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    return tuple(tensor for name in REPEATED if (tensor := getattr(inputs, name)) is not None)


@NEEDS_COMPILER
def test_two_problems_in_turns_over_one_workspace_are_as_each_alone() -> None:
    """What one launch leaves there is no other's business, whatever their shapes; and nobody writes past the end."""
    grid, band = 5, 64
    shapes = (
        Shape((8, 8), (700, 260), 8, 2, 128, dtype=torch.bfloat16),
        ONE_TOKEN,
        Shape((1,), (900,), 4, 2, 64, dtype=torch.bfloat16),
    )
    calls = [(paged(shape, 16, seed), tuple(bounds(shape).values())) for seed, shape in enumerate(shapes)]
    alone = [run_on_cpu(call, options(), sizes, grid) for call, sizes in calls]
    size = 2 * grid * configs.MOST_QUADS * decode_workspace._PARTIAL_BYTES // 4
    memory = torch.full((size + band,), torch.nan), torch.zeros(configs.MOST_ARRIVALS, dtype=torch.int32)
    memory[0][size:] = 42.0
    for _ in range(3):
        for (call, sizes), (out, lse) in zip(calls, alone, strict=True):
            again = run_on_cpu(call, options(), sizes, grid, memory)
            assert torch.equal(again[0], out)
            assert torch.equal(again[1], lse)
    assert (memory[0][size:] == 42).all()
    assert memory[0][:size].isfinite().any(), "blocks left each other something"


@NEEDS_COMPILER
@pytest.mark.parametrize("pieces", [(19, 17, 17, 19), (20, 18, 18, 20), (35, 33, 33, 35), (67, 65, 65, 67)])
def test_slots_that_a_block_uses_again_are_no_other_block_s(
    pieces: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of which two have a set alone, and share the others, side by side."""
    keys = tuple(128 * count for count in pieces)
    shape = Shape((1,) * 4, keys, 1, 1, 64, dtype=torch.bfloat16)
    call, chosen, most = paged(shape, 16), options(split_keys=128), (1, max(keys))
    out, lse = run_on_cpu(call, chosen, most, 1)
    assert_as_exact_as_pytorch(out, lse, call, **bounds(shape), split_keys=128)

    class SideBySide:
        def __init__(self, configuration: DecodeConfiguration, dtype: torch.dtype) -> None:
            compiled = decode.kernel(configuration, dtype, "sm_90")
            self.emulation = compile_emulation(compiled, "Parameters", together=True)

        def run(self, buffer: object, grid: int) -> None:
            self.emulation.run_together(buffer, grid, 1, grid)

    monkeypatch.setattr(emulated_decode, "library", SideBySide)
    again = run_on_cpu(call, chosen, most, 4)
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)


@NEEDS_COMPILER
@pytest.mark.parametrize("dim", [32, 128])
def test_with_split_keys_a_block_and_many_add_parts_alike(dim: int) -> None:
    """What a block has of a set alone meets part by part in slots that it uses again; what blocks share, at the end."""
    keys = (2000, 9000, 130, 17000, 4097, 5)
    shape = Shape((1,) * len(keys), keys, 2, 2, dim, dtype=torch.bfloat16)
    call = paged(shape, 16)
    chosen = options(split_keys=128)
    out, lse = run_on_cpu(call, chosen, (1, 17000), 1)
    assert_as_exact_as_pytorch(out, lse, call, **bounds(shape), split_keys=128)
    for grid, team in ((2, 1), (2, 2), (5, 1), (6, 2), (150, 1), (400, 2)):
        again = run_on_cpu(call, chosen, (1, 17000), grid, team=team)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


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
def test_many_pieces_meet_in_groups(grid: int, split_keys: int | None) -> None:
    shape = Shape((1, 1), (5000, 4800), 1, 1, 32, dtype=torch.bfloat16)
    call = paged(shape, 16)
    out, lse = run_on_cpu(call, options(split_keys=split_keys), (1, 5000), grid)
    assert_as_exact_as_pytorch(out, lse, call, **bounds(shape))
