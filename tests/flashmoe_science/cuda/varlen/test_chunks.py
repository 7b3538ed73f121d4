"""Chunked local attention in every CUDA kernel, emulated: see ../../chunk_cases.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import emulated_hopper_varlen
import emulated_varlen
import pytest
import torch
from chunk_cases import CHUNK, FEW, LENGTHS, call_of, shape_of
from compiled_for import each_architecture
from emulated import NEEDS_COMPILER
from emulated_decode import inputs_of, options, run_on_cpu
from varlen_cases import Call, Shape, bounds, packed, paged
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science.cuda.varlen import decode, hopper, portable
from flashmoe_science.jit.nvrtc import CudaKernel, compile_kernel
from flashmoe_science.varlen.arguments import check
from flashmoe_science.varlen.problem import Problem, Sizes
from problems import H200

BF16 = torch.bfloat16
each_page_size = pytest.mark.parametrize("page_size", [0, 16, 1])
MORE: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": (20, 0)},
    "wide window": {"causal": False, "window": (70, 5)},
}
each_mask = pytest.mark.parametrize("mask", MORE)


def assert_right(result: tuple[torch.Tensor, torch.Tensor], call: Call, shape: Shape, **given: Any) -> None:
    assert_as_exact_as_pytorch(*result, call, **{**bounds(shape), **given})


@NEEDS_COMPILER
@each_page_size
@each_mask
@pytest.mark.parametrize("lengths", FEW)
def test_decode(lengths: str, mask: str, page_size: int) -> None:
    shape = shape_of(lengths)
    call = call_of(shape, page_size)
    given = {**MORE[mask], "chunk": CHUNK}
    result = run_on_cpu(call, options(**given), tuple(bounds(shape).values()), 5)
    assert_right(result, call, shape, **given)


@NEEDS_COMPILER
@pytest.mark.parametrize("chunk", [1, 16, 2**30])
def test_decode_with_chunks_of_any_size_and_everything_else(chunk: int) -> None:
    shape = shape_of("steps of 4")
    call = call_of(shape, 16, chunk) | {"sinks": torch.tensor([0.5, -torch.inf, 2.0, 0.0])}
    given = {"chunk": chunk, "split_keys": 128, "softcap": 3.0}
    result = run_on_cpu(call, options(**given), tuple(bounds(shape).values()), 5)
    assert_right(result, call, shape, **given)


@NEEDS_COMPILER
@each_page_size
@pytest.mark.parametrize(
    ("lengths", "mask"),
    [*((lengths, "causal") for lengths in LENGTHS), *(("chunks of prompts", mask) for mask in MORE)],
)
def test_portable(lengths: str, mask: str, page_size: int) -> None:
    shape = shape_of(lengths)
    call = call_of(shape, page_size)
    given = {**MORE[mask], "chunk": CHUNK}
    assert_right(emulated_varlen.attend(call, short=True, **bounds(shape), **given), call, shape, **given)


@NEEDS_COMPILER
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize(
    ("lengths", "mask"),
    [*((lengths, "causal") for lengths in LENGTHS), *(("chunks of prompts", mask) for mask in MORE)],
)
def test_hopper(lengths: str, mask: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(lengths, head_dim=64)
    call = call_of(shape, page_size)
    given = {**MORE[mask], "chunk": CHUNK}
    assert_right(
        emulated_hopper_varlen.attend(call, monkeypatch, **bounds(shape), **given), call, shape, **given
    )


@NEEDS_COMPILER
@pytest.mark.parametrize("heads", [(6, 2), (3, 3)])
def test_hopper_goes_from_chunk_to_chunk_in_long_sequences(
    heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape((300, 260), (700, 260), *heads, 64, dtype=BF16)
    call = call_of(shape, 0)
    for chunk in (128, 200):
        given = {"chunk": chunk}
        result = emulated_hopper_varlen.attend(call, monkeypatch, **bounds(shape), **given)
        assert_right(result, call, shape, **given)


@NEEDS_COMPILER
@pytest.mark.parametrize("page_size", [0, 1, 8])
@pytest.mark.parametrize(("head_dim", "chunk"), [(128, 448), (128, 1088), (64, 704), (64, 2112)])
def test_rows_of_one_chunk_beside_rows_of_the_next(
    head_dim: int, chunk: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a causal mask the first warpgroup of a tile sees a chunk's blocks less than the second one."""
    keys = 2 * chunk
    first = chunk - 64  # of the queries' positions: the chunk's last rows are the tile's first
    shape = Shape((keys - first,), (keys,), 1, 1, head_dim, dtype=BF16)
    call = paged(shape, page_size) if page_size else packed(shape)
    given = {"causal": False, "chunk": chunk}
    result = emulated_hopper_varlen.attend(call, monkeypatch, **bounds(shape), **given)
    assert_right(result, call, shape, **given)


# --- on the host


def problem_of(head_dim: int = 128, **changes: Any) -> Problem:
    call = call_of(shape_of("decode", head_dim=head_dim, heads=8), 16)
    return check(inputs_of(call), options(**changes))


def test_only_calls_with_chunks_have_kernels_with_them() -> None:
    plain, chunked = problem_of(), problem_of(chunk=8192)

    def kernels(problem: Problem) -> list[CudaKernel]:
        sizes = Sizes(8, 1, 300)
        tile = emulated_hopper_varlen.tile_of(problem)
        general = emulated_varlen.tiles("sm_80", 128, 128, portable.features(problem)).short
        return [
            decode.kernel(decode.configuration_for(problem, sizes, H200), BF16, "sm_90"),
            hopper.kernel(tile, BF16),
            portable.kernel(general, BF16, "sm_80"),
        ]

    for without, with_chunks in zip(kernels(plain), kernels(chunked), strict=True):
        assert "CHUNK" not in without.macros
        assert with_chunks.macros["CHUNK"] == 1
    assert replace(chunked, chunk=0) == plain


@each_architecture(["sm_80", "sm_90"])
def test_kernels_with_chunks_keep_everything_in_registers(architecture: str, nvrtc: None) -> None:
    problem = problem_of(chunk=8192)
    if architecture == "sm_90":
        for queries in (1, 4):
            configuration = decode.configuration_for(problem, Sizes(8, queries, 300), H200)
            compile_kernel(decode.kernel(configuration, BF16, "sm_90"))
        compile_kernel(hopper.kernel(emulated_hopper_varlen.tile_of(problem), BF16))
    tiles = emulated_varlen.tiles(architecture, 128, 128, portable.features(problem))
    for tile in (tiles.tall, tiles.short):
        compile_kernel(portable.kernel(tile, BF16, architecture))
