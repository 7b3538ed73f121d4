"""Routing's kernels, their own source run on the CPU: every slot in its place, whatever the blocks."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import pytest
import torch
from emulated import NEEDS_COMPILER, compile_emulation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_products import routing as expected_routing

from flashmoe_science.cuda.moe import routing

pytestmark = NEEDS_COMPILER

CAPACITY = 128
CHUNK = 2048
Run = Callable[[torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def route() -> Run:
    """(ids, experts, slots of a block) -> expert_offsets, sorted_slots, the counters."""
    libraries: dict[tuple[str, int, bool], ctypes.CDLL] = {}

    def library(function: str, chunk: int, ids64: bool) -> ctypes.CDLL:
        name = function, chunk, ids64
        if name not in libraries:
            compiled = routing.kernel(function, CAPACITY, chunk, ids64, "sm_80")
            libraries[name] = compile_emulation(compiled, "routing::Parameters")
        return libraries[name]

    def run(ids: torch.Tensor, experts: int, chunk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        slots = ids.numel()
        blocks = max(1, -(-slots // chunk))
        offsets, order, counts, counters = (
            torch.full((size,), -7, dtype=torch.int32)
            for size in (experts + 1, max(1, slots), blocks * experts, routing.TICKETS_BYTES // 4)
        )
        addresses = (tensor.data_ptr() for tensor in (ids, offsets, order, counts, counters))
        arguments = struct.pack("5Q2i", *addresses, slots, experts)
        ids64 = ids.dtype == torch.int64
        if blocks > 1:
            library("moe_count", chunk, ids64).run(arguments, blocks)
        library("moe_place", chunk, ids64).run(arguments, blocks)
        return offsets, order, counters

    return run


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    slots=st.one_of(st.integers(1, 40), st.integers(1, 3 * CHUNK)),
    experts=st.integers(1, CAPACITY),
    outside=st.sampled_from([0.0, 0.3, 1.0]),
    chunk=st.sampled_from([CHUNK, 4 * CHUNK]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 1 << 20),
)
def test_sorts_slots_by_expert(
    route: Run, slots: int, experts: int, outside: float, chunk: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, experts, (slots,), generator=generator, dtype=dtype)
    replaced = torch.rand(slots, generator=generator) < outside
    wrong = torch.tensor([-1, experts, 1 << 30 if dtype == torch.int32 else 1 << 40])
    ids[replaced] = wrong[torch.randint(0, 3, (int(replaced.sum()),), generator=generator)].to(dtype)
    right = expected_routing(ids[:, None], experts)
    offsets, order, counters = route(ids, experts, chunk)
    assert torch.equal(offsets, right.expert_offsets)
    assert torch.equal(order[: right.rows], right.sorted_slots)
    assert (order[right.rows : slots] == -7).all()
    assert not counters.any()


@pytest.mark.parametrize("experts", [1, 128])
def test_one_expert_gets_everything(route: Run, experts: int) -> None:
    ids = torch.full((2 * CHUNK + 5,), experts - 1, dtype=torch.int32)
    offsets, order, _ = route(ids, experts, CHUNK)
    assert offsets.tolist() == [0] * experts + [len(ids)]
    assert torch.equal(order, torch.arange(len(ids), dtype=torch.int32))
