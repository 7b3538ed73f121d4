"""Launches that are captured when no counters are left: what they write to lies nowhere else."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated import NEEDS_COMPILER, compile_emulation
from emulated_decode import inputs_of, options, run_on_cpu
from reused_memory import ReusedMemory, capture_into
from varlen_cases import Shape, bounds, paged

from flashmoe_science.cuda.attention import small
from flashmoe_science.cuda.tickets import TicketPool
from flashmoe_science.cuda.varlen import decode, decode_calls
from flashmoe_science.varlen.arguments import check
from flashmoe_science.varlen.problem import Sizes, Tensors
from problems import H200

STREAM = 77


def used_up() -> TicketPool:
    return TicketPool(torch.zeros(1, dtype=torch.int32))


def test_memory_that_is_given_back_is_given_again() -> None:
    memory = ReusedMemory()
    kept, other = (memory.allocate((3,), (1,), torch.float32) for _ in range(2))
    address = other.data_ptr()
    del other
    assert memory.zeros(3, dtype=torch.int32, device="cpu").data_ptr() == address != kept.data_ptr()


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("split_keys", "head_dim", "keys", "grid"),
    [
        (128, 64, (1100, 300), 8),
        (128, 128, (1100, 300), 8),
        (
            None,
            64,
            (600,) * 12,
            132,
        ),  # without splits the first place is nobody's, so it takes some blocks to see it
    ],
)
def test_decode(
    split_keys: int | None, head_dim: int, keys: tuple[int, ...], grid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks leave each other results, and count who has arrived."""
    memory, pool = ReusedMemory(), used_up()
    capture_into(memory, monkeypatch, decode_calls)
    monkeypatch.setattr(decode, "is_capturing", lambda: True)

    class Launcher:
        def __init__(self, function: object, blocks: Any, compiled: Any, size: int, **_: Any) -> None:
            self.buffer = ctypes.create_string_buffer(size)
            emulation = compile_emulation(compiled, "Parameters")
            self.start = lambda stream: emulation.run(self.buffer, blocks[0])

    # Blocks of a cluster leave each other nothing in memory.
    monkeypatch.setattr(decode.configs, "cluster_for", lambda *of: 1)
    monkeypatch.setattr(decode, "Launcher", Launcher)
    monkeypatch.setattr(decode, "load", lambda *arguments, **options: None)
    monkeypatch.setattr(decode, "decode_arrival_pool", lambda device: pool)
    monkeypatch.setattr(decode, "raw_stream", lambda device: STREAM)
    shape = Shape((1,) * len(keys), keys, heads=4, kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16)
    chosen, sizes = options(split_keys=split_keys), tuple(bounds(shape).values())
    calls = [paged(shape, 16, seed) for seed in range(3)]
    device = dataclasses.replace(H200, multiprocessors=grid)
    team = 1 if split_keys else decode.configs.team_for(2, grid)
    run = decode.prepare(check(inputs_of(calls[0]), chosen), device, 1)
    for call in calls:
        given = inputs_of(call)
        lse = torch.full((len(keys), 4), torch.nan)
        out = torch.full((*lse.shape, head_dim), torch.nan, dtype=torch.bfloat16)
        run(Tensors._make((*given[:3], out, lse, *given[3:9], *given[10:])), Sizes(len(keys), *sizes))
        expected, expected_lse = run_on_cpu(call, chosen, sizes, grid, team=team)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)


def test_small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    floats, counters = 1000, 3
    capture_into(ReusedMemory(), monkeypatch, small)
    launcher: Any = SimpleNamespace(buffer=ctypes.create_string_buffer(256), start_at=lambda *addresses: None)
    small._split_launch(launcher, floats, counters, used_up(), 0)(1, 2, 3, 4, 5, STREAM)
    partials, arrivals = struct.unpack_from("2Q", launcher.buffer, small._SPLIT_AT)
    assert arrivals + 4 * counters <= partials or partials + 4 * floats <= arrivals
