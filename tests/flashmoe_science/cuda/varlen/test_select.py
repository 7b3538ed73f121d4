"""Which kernel takes a call of `attention_varlen`, and what a plan knows of lengths."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
from types import SimpleNamespace

import pytest
import torch
from emulated_varlen import inputs_of, problem_of
from hypothesis import given
from hypothesis import strategies as st
from varlen_cases import Shape, bounds, packed, paged

from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.varlen import hopper, portable
from flashmoe_science.cuda.varlen.kind import VarlenKernel, bucket
from flashmoe_science.cuda.varlen.select import MODULES, OVERRIDE_VARIABLE, select
from flashmoe_science.errors import InputError, KernelDefectError, NoKernelError
from flashmoe_science.varlen.arguments import check_sizes
from flashmoe_science.varlen.problem import Problem, Run, Sizes, Tensors
from problems import H200, L4

prepare = importlib.import_module("flashmoe_science.cuda.varlen.prepare")

PROBLEM = problem_of(packed(Shape((1,), (1,), 4, 2, 64, dtype=torch.bfloat16)))


def sizes_of(queries: int, batch: int = 1, keys: int = 100) -> Sizes:
    return Sizes(batch, queries, keys)


def taken(problem: Problem, device: Device, sizes: Sizes, tokens: int | None = None) -> VarlenKernel:
    """By a call whose sequences are equally long, unless it has another number of tokens."""
    return select(problem, device, sizes, sizes.batch * sizes.max_seqlen_q if tokens is None else tokens)


def test_every_kernel_has_a_module() -> None:
    assert set(MODULES) == set(VarlenKernel)


@given(st.integers(0, 1 << 24))
def test_a_bucket_holds_its_lengths_and_there_are_few(most: int) -> None:
    assert most <= bucket(most) <= 2 * most
    assert len({bucket(length) for length in range(0, 10_000)}) == 15


@pytest.mark.parametrize(
    ("device", "prompts"), [(H200, VarlenKernel.HOPPER), (L4, VarlenKernel.PORTABLE)], ids=["H200", "L4"]
)
@pytest.mark.parametrize("queries", [1, 8, 16, 8191])
def test_few_queries_go_to_the_decode_kernel(device: Device, prompts: VarlenKernel, queries: int) -> None:
    expected = VarlenKernel.DECODE if queries < 16 else prompts
    assert taken(PROBLEM, device, sizes_of(queries)) is expected


@pytest.mark.parametrize(
    ("queries", "batch", "keys", "head_dim", "window", "expected"),
    [
        (1, 1, 1024, 128, -1, VarlenKernel.DECODE),
        (1, 1, 8192, 128, -1, VarlenKernel.DECODE_HOPPER),
        (8, 1, 2048, 128, -1, VarlenKernel.DECODE),
        (1, 8, 2048, 128, -1, VarlenKernel.DECODE),
        (4, 8, 2048, 128, -1, VarlenKernel.DECODE_HOPPER),
        (1, 8, 8192, 128, -1, VarlenKernel.DECODE_HOPPER),
        (1, 64, 1024, 128, -1, VarlenKernel.DECODE_HOPPER),
        (1, 64, 8192, 64, -1, VarlenKernel.DECODE),
        (8, 64, 8192, 64, -1, VarlenKernel.DECODE_HOPPER),
        (8, 2, 8192, 64, 128, VarlenKernel.DECODE),
        (8, 8, 8192, 64, 128, VarlenKernel.DECODE),
        (1, 64, 128, 128, -1, VarlenKernel.DECODE),
        (4, 64, 128, 128, -1, VarlenKernel.DECODE_HOPPER),
        (8, 64, 8192, 64, 128, VarlenKernel.DECODE_HOPPER),
        (16, 64, 8192, 128, -1, VarlenKernel.HOPPER),
    ],
)
def test_which_kernel_takes_few_queries_on_hopper(
    queries: int, batch: int, keys: int, head_dim: int, window: int, expected: VarlenKernel
) -> None:
    call = paged(Shape((1,), (1,), 32, 8, head_dim, dtype=torch.bfloat16), 64)
    problem = problem_of(call, window=(window, 0))
    assert taken(problem, H200, sizes_of(queries, batch, keys)) is expected
    assert taken(problem, L4, sizes_of(queries, batch, keys)) not in (
        VarlenKernel.DECODE_HOPPER,
        VarlenKernel.HOPPER,
    )


@pytest.mark.parametrize(
    ("queries", "batch", "tokens", "expected"),
    [
        (2048, 129, 2176, VarlenKernel.MIXED_HOPPER),  # a chunk and 128 decode steps
        (512, 68, 4 * 512 + 64, VarlenKernel.MIXED_HOPPER),
        (2048, 8, 4096, VarlenKernel.MIXED_HOPPER),
        (2048, 8, 4097, VarlenKernel.HOPPER),
        (2048, 3, 2050, VarlenKernel.HOPPER),
        (2048, 8, 8 * 2048, VarlenKernel.HOPPER),
        (15, 64, 80, VarlenKernel.DECODE_HOPPER),
    ],
)
def test_which_kernel_takes_prompts_beside_decode_steps(
    queries: int, batch: int, tokens: int, expected: VarlenKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(paged(Shape((1,), (1,), 32, 8, 128, dtype=torch.bfloat16), 16))
    sizes = sizes_of(queries, batch, 2048)
    assert taken(problem, H200, sizes, tokens) is expected
    assert taken(problem, L4, sizes, tokens) in (VarlenKernel.DECODE, VarlenKernel.PORTABLE)
    without = problem_of(paged(Shape((1,), (1,), 32, 8, 128, dtype=torch.bfloat16), 16), split_keys=128)
    assert taken(without, H200, sizes, tokens) is not VarlenKernel.MIXED_HOPPER
    monkeypatch.setenv(OVERRIDE_VARIABLE, "hopper")
    if queries > 15:
        assert taken(problem, H200, sizes, tokens) is VarlenKernel.HOPPER


@pytest.mark.parametrize("device", [H200, L4], ids=["H200", "L4"])
@given(
    queries=st.integers(0, 40),
    heads=st.sampled_from([(1, 1), (16, 4), (16, 8), (64, 8), (71, 1)]),
    head_dim=st.sampled_from([8, 64, 128, 192, 256]),
    page_size=st.sampled_from([0, 1, 16, 48, 64]),
    window=st.sampled_from([(-1, -1), (100, 0)]),
    softcap=st.sampled_from([0.0, 20.0]),
    split_keys=st.sampled_from([None, 128]),
)
def test_every_call_of_16_bits_has_a_kernel(
    device: Device,
    queries: int,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    window: tuple[int, int],
    softcap: float,
    split_keys: int | None,
) -> None:
    """Also where rows are too many for the decode kernel, as 8 tokens of 4 heads over pages of 1."""
    shape = Shape((queries,), (3,), *heads, head_dim, dtype=torch.bfloat16)
    call = paged(shape, page_size) if page_size else packed(shape)
    problem = problem_of(call, window=window, softcap=softcap, split_keys=split_keys)
    taken(problem, device, sizes_of(queries))


def test_rows_too_many_for_the_decode_kernel_go_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(paged(Shape((8,), (3,), 16, 4, 128, dtype=torch.bfloat16), 1), split_keys=128)
    assert taken(problem, H200, sizes_of(8)) is VarlenKernel.DECODE_HOPPER
    assert taken(dataclasses.replace(problem, head_dim=96), H200, sizes_of(8)) is VarlenKernel.HOPPER
    monkeypatch.setenv(OVERRIDE_VARIABLE, "decode")
    with pytest.raises(NoKernelError, match="decode: it is for few queries: up to 16 rows of heads"):
        taken(problem, H200, sizes_of(8))


def test_what_the_hopper_kernel_has_not_goes_to_the_general_one() -> None:
    call = packed(Shape((1,), (1,), 4, 2, 64, dtype=torch.bfloat16))
    call["alibi_slopes"] = torch.rand(4)
    assert taken(problem_of(call), H200, sizes_of(8191)) is VarlenKernel.PORTABLE


def test_a_kernel_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE_VARIABLE, "portable")
    assert taken(PROBLEM, H200, sizes_of(1)) is VarlenKernel.PORTABLE
    monkeypatch.setenv(OVERRIDE_VARIABLE, "fast")
    with pytest.raises(InputError, match="FLASHMOE_CUDA_VARLEN='fast' names no kernel; expected one of"):
        taken(PROBLEM, H200, sizes_of(1))


def test_no_kernel_says_why_each_does_not_take_it() -> None:
    problem = problem_of(packed(Shape((1,), (1,), 1, 1, 576, 512, dtype=torch.bfloat16)))
    with pytest.raises(
        NoKernelError, match=r"attention_varlen \(.*portable: head_dim is 576, and it takes at most 256"
    ):
        taken(problem, H200, sizes_of(1023))


def test_a_kernel_that_this_compiler_spills_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def spilt(*given: object) -> Run:
        raise KernelDefectError("attention_hopper_varlen spills 8 bytes")

    def made(*given: object) -> Run:
        return result

    result: Run = lambda tensors, sizes: None  # noqa: E731
    monkeypatch.setattr(MODULES[VarlenKernel.HOPPER], "prepare", spilt)
    monkeypatch.setattr(MODULES[VarlenKernel.PORTABLE], "prepare", made)
    with pytest.warns(RuntimeWarning, match="spills 8 bytes; taking another kernel"):
        assert prepare.first_of([VarlenKernel.HOPPER, VarlenKernel.PORTABLE], PROBLEM, H200, 255) is result
    with pytest.raises(KernelDefectError):
        prepare.first_of([VarlenKernel.HOPPER], PROBLEM, H200, 255)


@pytest.mark.parametrize("split_keys", [None, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [(1, 1), (16,), (300, 5), (4096, 4096, 4096)], ids=str)
@pytest.mark.parametrize("kind", [VarlenKernel.HOPPER, VarlenKernel.PORTABLE])
def test_what_is_explained_is_what_a_call_starts(
    kind: VarlenKernel,
    lengths: tuple[int, ...],
    head_dim: int,
    split_keys: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the kernels that have several tiles; the decode kernel's configuration is one function's."""
    started: list[object] = []

    def launcher(tile: object, *others: object) -> SimpleNamespace:
        return SimpleNamespace(
            buffer=ctypes.create_string_buffer(4096),
            config=SimpleNamespace(grid=[0, 0, 0]),
            start=lambda stream: started.append(tile),
        )

    def launch(problem: Problem, tile: object, device: Device) -> SimpleNamespace:
        return SimpleNamespace(launcher=launcher(tile), describe=lambda tensors: None)

    monkeypatch.setattr(portable, "launcher", launcher)
    monkeypatch.setattr(portable, "raw_stream", lambda index: 0)
    monkeypatch.setattr(hopper, "_Launch", launch)
    monkeypatch.setattr(hopper, "raw_stream", lambda index: 0)
    monkeypatch.setattr(hopper, "ticket_pool", lambda index: SimpleNamespace(take=lambda stream: 0))
    shape = Shape(lengths, lengths, 16, 4, head_dim, dtype=torch.bfloat16)
    call = packed(shape)
    problem = problem_of(call, split_keys=split_keys)
    sizes = check_sizes(inputs_of(call), **bounds(shape))
    query, starts = call["query"], call["cu_seqlens_q"]
    tensors = Tensors(
        *(query, call["key"], call["value"], torch.empty_like(query), None, starts, call["cu_seqlens_k"]),
        *(None, None, None, None),
    )
    MODULES[kind].prepare(problem, H200, bucket(sizes.max_seqlen_q))(tensors, sizes)
    choice = MODULES[kind].choose(problem, H200, sizes, query.shape[0])
    assert started == [choice.configuration]
    assert choice.kernel is kind
