"""Sequences of one token as a launch of their own, with `split_keys`: what each kernel leaves alone, and who asks."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import emulated_decode
import emulated_decode_hopper
import emulated_hopper_varlen
import emulated_varlen
import pytest
import torch
from compiled_for import each_architecture
from emulated import NEEDS_COMPILER
from emulated_decode import options
from emulated_varlen import problem_of
from varlen_cases import Call, Shape, bounds, packed, paged, picked, quantized
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.varlen import decode, decode_hopper, hopper, portable
from flashmoe_science.cuda.varlen.kind import VarlenKernel
from flashmoe_science.cuda.varlen.select import MODULES, OVERRIDE_VARIABLE, explained, launched
from flashmoe_science.errors import NoKernelError
from flashmoe_science.jit.nvrtc import compile_kernel
from flashmoe_science.varlen.problem import Only, Problem, Run, Sizes, Tensors
from problems import H200, L4

prepare = importlib.import_module("flashmoe_science.cuda.varlen.prepare")

BF16 = torch.bfloat16
SPLIT = 128
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]
BATCH = Shape((1, 4, 0, 1, 3, 1, 1), (300, 290, 40, 129, 7, 0, 5), 4, 2, 64, dtype=BF16)
ONES = (0, 3, 5, 6)
"""Of the batch, sequences of one token."""
OTHERS = (1, 2, 4)


def made(shape: Shape, page_size: int) -> Call:
    return paged(shape, page_size, spare_rows=2) if page_size else packed(shape, spare_rows=2)


def rows_of(shape: Shape, indices: tuple[int, ...]) -> torch.Tensor:
    starts = torch.tensor([0, *shape.queries]).cumsum(0).tolist()
    return torch.cat([torch.arange(starts[index], starts[index + 1]) for index in indices])


def assert_apart(attend: Attend, call: Call, shape: Shape, own: tuple[int, ...], only: Only) -> None:
    """Rows of ``own`` have the bits that they have in a batch without the others, whose rows stay NaN."""
    out, lse = attend(call, bounds(shape), only)
    alone = picked(call, shape, *own)
    of_own = rows_of(shape, own)
    most = max(shape.queries[index] for index in own)
    for each in (Only.ALL, only):
        expected, expected_lse = attend(alone, {**bounds(shape), "max_seqlen_q": most}, each)
        assert torch.equal(out[of_own], expected)
        assert torch.equal(lse[of_own], expected_lse)
        assert not expected.isnan().any()
    left = rows_of(shape, OTHERS if own is ONES else ONES)
    assert out[left].isnan().all()
    assert lse[left].isnan().all()
    total = sum(shape.queries)
    assert not out[total:].any(), "rows of no sequence are zeros"
    assert (lse[total:] == -torch.inf).all()


def by_decode(call: Call, most: dict[str, int], only: Only) -> tuple[torch.Tensor, torch.Tensor]:
    return emulated_decode.run_on_cpu(call, options(split_keys=SPLIT), tuple(most.values()), 5, only=only)


@NEEDS_COMPILER
@pytest.mark.parametrize("page_size", [0, 1, 16])
def test_decode_of_one_token_leaves_other_sequences(page_size: int) -> None:
    def attend(call: Call, most: dict[str, int], only: Only) -> tuple[torch.Tensor, torch.Tensor]:
        return by_decode(call, {**most, "max_seqlen_q": 1}, only)

    assert_apart(attend, made(BATCH, page_size), BATCH, ONES, Only.ONE_TOKEN)


@NEEDS_COMPILER
@pytest.mark.parametrize("page_size", [0, 16])
def test_decode_of_several_tokens_leaves_sequences_of_one(page_size: int) -> None:
    assert_apart(by_decode, made(BATCH, page_size), BATCH, OTHERS, Only.OTHERS)


@NEEDS_COMPILER
def test_decode_over_fp8_leaves_other_sequences() -> None:
    call, _ = quantized(made(BATCH, 16), "each head")

    def attend(call: Call, most: dict[str, int], only: Only) -> tuple[torch.Tensor, torch.Tensor]:
        return by_decode(call, {**most, "max_seqlen_q": 1}, only)

    assert_apart(attend, call, BATCH, ONES, Only.ONE_TOKEN)


@NEEDS_COMPILER
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("only", [Only.ONE_TOKEN, Only.OTHERS])
def test_hoppers_decode_leaves_the_others_sequences(
    only: Only, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(call: Call, most: dict[str, int], only: Only) -> tuple[torch.Tensor, torch.Tensor]:
        queries = 1 if own is ONES else most["max_seqlen_q"]
        given = options(split_keys=SPLIT), (queries, most["max_seqlen_k"])
        return emulated_decode_hopper.attend(call, *given, monkeypatch, 5, only=only)

    own = ONES if only is Only.ONE_TOKEN else OTHERS
    assert_apart(attend, made(BATCH, page_size), BATCH, own, only)


@NEEDS_COMPILER
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("kernel", ["hopper", "portable"])
def test_kernels_for_prompts_leave_sequences_of_one_token(
    kernel: str, page_size: int, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    def attend(call: Call, most: dict[str, int], only: Only) -> tuple[torch.Tensor, torch.Tensor]:
        given: dict[str, Any] = {**most, "split_keys": SPLIT, "only": only}
        if kernel == "hopper":
            return emulated_hopper_varlen.attend(call, monkeypatch, **given)
        return emulated_varlen.attend(call, **given)

    shape = dataclasses.replace(BATCH, queries=(1, 150, 0, 1, 3, 1, 1))
    assert_apart(attend, made(shape, page_size), shape, OTHERS, Only.OTHERS)


@NEEDS_COMPILER
def test_one_row_of_no_sequence_is_no_sequence_of_one_token(
    monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    shape = Shape((3, 1), (20, 30), 4, 2, 64, dtype=BF16)
    call, given = packed(shape, spare_rows=1), {**bounds(shape), "only": Only.OTHERS}
    for out, lse in (
        emulated_hopper_varlen.attend(call, monkeypatch, **given),
        emulated_varlen.attend(call, **given),
    ):
        assert out[3].isnan().all()
        assert not out[4].any()
        assert (lse[4] == -torch.inf).all()


def problem(
    head_dim: int = 128, *, heads: int = 32, page_size: int = 16, fp8: bool = False, **given: Any
) -> Problem:
    call = made(Shape((1,), (1,), heads, 8 if heads % 8 == 0 else 1, head_dim, dtype=BF16), page_size)
    return problem_of(quantized(call, "each head")[0] if fp8 else call, **{"split_keys": 512, **given})


@pytest.mark.parametrize(("device", "most"), [(H200, 1), (H200, 7), (H200, 511), (L4, 1), (L4, 7), (L4, 511)])
def test_with_split_keys_sequences_of_one_token_are_asked_for_alone(device: Device, most: int) -> None:
    for given in (problem(), problem(64, page_size=1), problem(256), problem(fp8=True)):
        expected = Only.ONE_TOKEN if most == 1 else Only.OTHERS
        assert launched(given, device, most).only is expected
        without = dataclasses.replace(given, split_keys=0)
        assert launched(without, device, most) is without


@pytest.mark.parametrize("most", [1, 511])
def test_where_the_kernel_for_prompts_takes_one_token_too_there_is_one_launch(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_heads = problem(heads=71)  # that share keys: more rows than kernels for few take
    assert launched(many_heads, H200, most) is many_heads
    monkeypatch.setenv(OVERRIDE_VARIABLE, "portable")
    for given in (problem(), problem(fp8=True)):
        assert launched(given, H200, most) is given
    monkeypatch.setenv(OVERRIDE_VARIABLE, "decode_hopper")
    assert launched(problem(fp8=True), H200, most).only is Only.ALL
    assert launched(problem(), H200, most).only is not Only.ALL


@pytest.mark.parametrize("only", Only)
def test_what_is_not_asked_for_is_no_macro(only: Only) -> None:
    """So that all other kernels are what they were."""
    asked = dataclasses.replace(problem(), only=only)
    sizes = Sizes(8, 4, 1000)
    hopper_tile = emulated_hopper_varlen.tile_of(asked)
    tile = emulated_varlen.tiles("sm_90", 128, 128, portable.features(asked)).tall
    for kernel in (
        decode.kernel(decode.configuration_for(asked, sizes, H200), BF16, "sm_90"),
        decode_hopper.kernel(decode_hopper.configuration_for(asked, sizes, H200), BF16),
        hopper.kernel(hopper_tile, BF16),
        portable.kernel(tile, BF16, "sm_90"),
    ):
        assert kernel.macros.get("ONLY", 0) == only


Started = list[tuple[VarlenKernel, Only, bool, int]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What a call starts, in order: kernel, sequences, whether the cache is FP8, and the bound on queries.

    Each kernel writes its number: 1 into rows of sequences of one token, 2 into those of others, or 3 into all.
    """
    launches: Started = []

    def module(kind: VarlenKernel) -> Callable[[Problem, Device, int], Run]:
        def make(asked: Problem, device: Device, most_queries: int) -> Run:
            def run(tensors: Tensors, sizes: Sizes) -> None:
                launches.append((kind, asked.only, asked.quantized is not None, sizes.max_seqlen_q))
                counts = tensors.cu_seqlens_q.diff().repeat_interleave(tensors.cu_seqlens_q.diff())
                own = {Only.ALL: counts > 0, Only.ONE_TOKEN: counts == 1, Only.OTHERS: counts > 1}[asked.only]
                tensors.output[own] = int(asked.only) or 3

            return run

        return make

    for kind, each in MODULES.items():
        monkeypatch.setattr(each, "prepare", module(kind))
    monkeypatch.setattr(prepare, "device_of", lambda index: H200)
    monkeypatch.setattr(prepare, "make_context_current", lambda index: None)
    monkeypatch.setattr(prepare, "current_device", lambda: 0)
    return launches


def start(asked: Problem, queries: tuple[int, ...], run: Run | None = None) -> tuple[Run, torch.Tensor]:
    shape = Shape(
        queries, (40,) * len(queries), asked.num_heads, asked.num_kv_heads, asked.head_dim, dtype=BF16
    )
    call = paged(shape, 16)
    if asked.quantized is not None:
        call, _ = quantized(call, "each head")
    run = run or prepare.prepare(asked, torch.device("cuda", 0))
    output = torch.full((*call["query"].shape[:2], asked.value_dim), torch.nan, dtype=BF16)
    given = {name: call.get(name) for name in Tensors._fields if name not in ("output", "lse")}
    run(Tensors(output=output, lse=None, **given), Sizes(len(queries), max(queries), 40))  # type: ignore[arg-type]
    return run, output


ONE = (VarlenKernel.DECODE_HOPPER, Only.ONE_TOKEN, False, 1)
"""Of head dim 128."""


def test_a_mixed_call_is_two_launches_and_a_decode_step_is_one(started: Started) -> None:
    run, output = start(problem(), (1, 300, 1))
    assert started == [(VarlenKernel.HOPPER, Only.OTHERS, False, 300), ONE]
    assert output[[0, -1]].eq(1).all()
    assert output[1:-1].eq(2).all()
    for queries in ((1, 1), (4, 1), (1, 1, 1)):
        started.clear()
        start(problem(), queries, run)
        others = [(VarlenKernel.DECODE_HOPPER, Only.OTHERS, False, 4)] if 4 in queries else []
        assert started == [*others, ONE]


def test_one_kernel_is_made_for_all_calls_of_one_token(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same one, so that no bit can depend on what is beside a sequence."""
    makes: list[Only] = []
    make = decode_hopper.prepare

    def counted(asked: Problem, device: Device, most_queries: int) -> Run:
        makes.append(asked.only)
        return make(asked, device, most_queries)

    monkeypatch.setattr(decode_hopper, "prepare", counted)
    run = None
    for queries in ((1, 300), (1,), (2, 1), (1, 40), (1, 1, 1)):
        run, _ = start(problem(), queries, run)
    assert makes.count(Only.ONE_TOKEN) == 1


def test_without_split_keys_there_is_one_launch(started: Started) -> None:
    start(problem(split_keys=None), (1, 300, 1))
    assert [(only, most) for _, only, _, most in started] == [(Only.ALL, 300)]


def test_the_copy_of_a_cache_of_fp8_is_for_longer_sequences_alone(started: Started) -> None:
    """The copy's output is copied whole, so what reads FP8 comes after it."""
    _, output = start(problem(fp8=True), (1, 300, 1))
    assert started == [
        (VarlenKernel.HOPPER, Only.OTHERS, False, 300),
        (VarlenKernel.DECODE, Only.ONE_TOKEN, True, 1),
    ]
    assert output[[0, -1]].eq(1).all()
    assert output[1:-1].eq(2).all()


def test_a_kernel_that_is_asked_for_takes_both_launches_or_none(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OVERRIDE_VARIABLE, "decode")
    start(problem(), (1, 4))
    assert [(kind, only) for kind, only, *_ in started] == [
        (VarlenKernel.DECODE, Only.OTHERS),
        (VarlenKernel.DECODE, Only.ONE_TOKEN),
    ]
    with pytest.raises(NoKernelError, match="decode: it is for few queries"):
        start(problem(), (1, 300))
    for fp8 in (False, True):
        started.clear()
        monkeypatch.setenv(OVERRIDE_VARIABLE, "portable")
        start(problem(fp8=fp8), (1, 300))
        assert started == [(VarlenKernel.PORTABLE, Only.ALL, False, 300)]


@pytest.mark.parametrize("device", [H200, L4], ids=["H200", "L4"])
def test_longer_sequences_have_one_kernel_for_all_bounds_from_16_on(device: Device) -> None:
    for given in (problem(64), problem(), problem(page_size=1), problem(fp8=True), problem(heads=71)):
        choices = {
            explained(given, device, Sizes(batch, most, most + 9), tokens)[0]
            for batch, most, tokens in ((1, 16, 16), (40, 16, 60), (2, 300, 301), (99, 9000, 100_000))
        }
        assert len(choices) == 1


def test_what_is_explained_has_the_launch() -> None:
    def choice(most: int, **given: Any) -> Choice:
        return explained(problem(**given), H200, Sizes(4, most, 1000), 4 * most)[0]

    words = "one launch more for sequences of one token"
    for given in ({}, {"fp8": True}):
        assert choice(300, **given).reason.endswith(words)
        assert words not in choice(1, **given).reason
        assert words not in choice(300, split_keys=None, **given).reason
    assert "over a copy of the cache in 16 bits, and" in choice(300, fp8=True).reason
    assert choice(1).configuration.only is Only.ONE_TOKEN
    assert choice(300).configuration.features.only is Only.OTHERS


@each_architecture(["sm_80", "sm_90"])
@pytest.mark.parametrize("only", [Only.ONE_TOKEN, Only.OTHERS])
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("head_dim", [64, 128, pytest.param(256, marks=pytest.mark.slow)])
def test_decode_keeps_in_registers_what_it_keeps_without(
    head_dim: int, page_size: int, only: Only, architecture: str, nvrtc: None
) -> None:
    device = dataclasses.replace(H200, architecture=architecture)
    queries = 1 if only is Only.ONE_TOKEN else 4
    of = partial(problem, head_dim, page_size=page_size)
    for given in (of(), of(heads=64), of(fp8=True)):
        asked = dataclasses.replace(given, only=only)
        configuration = decode.configuration_for(asked, Sizes(8, queries, 1000), device)
        all_sequences = dataclasses.replace(configuration, only=0)
        resources, of_all = (
            compile_kernel(decode.kernel(each, BF16, architecture), allow_defects=True).resources
            for each in (configuration, all_sequences)
        )
        assert resources.spill_store_bytes <= of_all.spill_store_bytes
        assert resources.spill_load_bytes <= of_all.spill_load_bytes
        assert only is Only.OTHERS or head_dim > 128 or resources.spill_store_bytes == 0
        if architecture == "sm_90" and decode_hopper.why_not(asked, H200, queries) is None:
            few = decode_hopper.configuration_for(asked, Sizes(8, queries, 1000), H200)
            compile_kernel(decode_hopper.kernel(few, BF16))


@each_architecture(["sm_80", "sm_90"])
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("head_dim", [64, 128, pytest.param(256, marks=pytest.mark.slow)])
def test_kernels_for_prompts_keep_everything_in_registers(
    head_dim: int, page_size: int, architecture: str, nvrtc: None
) -> None:
    asked = dataclasses.replace(problem(head_dim, page_size=page_size), only=Only.OTHERS)
    tile = emulated_varlen.tiles(architecture, head_dim, head_dim, portable.features(asked)).tall
    compile_kernel(portable.kernel(tile, BF16, architecture))
    if architecture == "sm_90":
        compile_kernel(hopper.kernel(emulated_hopper_varlen.tile_of(asked), BF16))


@NEEDS_COMPILER
def test_both_launches_give_the_whole_call(monkeypatch: pytest.MonkeyPatch) -> None:
    call, given = made(BATCH, 16), bounds(BATCH)
    out, lse = emulated_hopper_varlen.attend(call, monkeypatch, split_keys=SPLIT, only=Only.OTHERS, **given)
    ones = by_decode(call, {**given, "max_seqlen_q": 1}, Only.ONE_TOKEN)
    own = rows_of(BATCH, ONES)
    out[own], lse[own] = ones[0][own], ones[1][own]
    assert_as_exact_as_pytorch(out, lse, call, split_keys=SPLIT, **given)
