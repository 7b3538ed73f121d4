"""Calls of the general kernel without a GPU: which tile, which grid, and what is made anew for a call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from emulated_varlen import problem_of
from varlen_cases import Call, Shape, packed, paged

from flashmoe_science.configs.attention.varlen import VarlenConfiguration
from flashmoe_science.cuda.varlen import portable
from flashmoe_science.cuda.varlen.arguments import ARGUMENT_BYTES, PER_CALL, PlanArguments
from flashmoe_science.errors import InputError
from flashmoe_science.varlen.problem import Run, Sizes, Tensors
from problems import H200

BF16 = torch.bfloat16


@dataclass
class _Grid:
    grid: list[int] = field(default_factory=lambda: [1, 1, 1])


@dataclass
class _Launcher:
    """A launcher that keeps what it was started with."""

    block_m: int
    started: list[tuple[int, int, tuple[int, ...]]]
    config: _Grid = field(default_factory=_Grid)
    buffer: Any = field(default_factory=lambda: ctypes.create_string_buffer(ARGUMENT_BYTES))

    def start(self, stream: int) -> None:
        self.started.append((self.block_m, self.config.grid[0], PER_CALL.unpack_from(self.buffer, 0)))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, tuple[int, ...]]]:
    launches: list[tuple[int, int, tuple[int, ...]]] = []

    def launcher(
        tile: VarlenConfiguration, dtype: object, device: object, arguments: PlanArguments
    ) -> _Launcher:
        return _Launcher(tile.block_m, launches)

    monkeypatch.setattr(portable, "launcher", launcher)
    monkeypatch.setattr(portable, "raw_stream", lambda index: 0)
    return launches


def call_of(run: Run, call: Call, sizes: Sizes) -> None:
    query, value = call["query"], call["value"]
    output = query.new_empty(*query.shape[:2], value.shape[-1])
    names = ("cu_seqlens_q", "cu_seqlens_k", "block_table", "seqused_k", "sinks", "alibi_slopes")
    run(Tensors(query, call["key"], value, output, None, *(call.get(name) for name in names)), sizes)  # type: ignore[arg-type]


def test_many_rows_take_the_tall_tile_and_few_the_short_one(started: list[Any]) -> None:
    problem = problem_of(packed(Shape((1,), (1,), 32, 8, 128, dtype=BF16)))
    run = portable.prepare(problem, H200, 8191)
    for tokens, expected in ((4096, 128), (64, 64)):
        call_of(run, packed(Shape((tokens,), (tokens,), 32, 8, 128, dtype=BF16)), Sizes(1, tokens, tokens))
        block_m, blocks, fields = started[-1]
        assert block_m == expected
        # A tile for each row and head of a group, one more for its end, one for rows of no sequence.
        assert blocks == 8 * (4 * tokens // expected + 2)
        assert fields[13:16] == (1, tokens, blocks // 8)
        assert 1 <= fields[16] <= 8


def test_a_batch_of_decodes_needs_no_grid_for_its_longest_bound(started: list[Any]) -> None:
    """A bound of 8,191 queries for 128 sequences that have one each: blocks for tokens, not for bounds."""
    shape = Shape((1,) * 128, (5,) * 128, 32, 8, 64, dtype=BF16)
    call = paged(shape, 16)
    call_of(portable.prepare(problem_of(call), H200, 8191), call, Sizes(128, 8191, 5))
    assert started[-1][1] <= 8 * (128 + 1 + 128 * 4 // 64)


def test_with_split_keys_the_tile_is_the_same_in_any_batch(started: list[Any]) -> None:
    call = packed(Shape((1,), (1,), 32, 8, 128, dtype=BF16))
    tiles = set()
    for most, tokens in ((1, 1), (63, 40), (8191, 4096)):
        run = portable.prepare(problem_of(call, split_keys=256), H200, most)
        call_of(run, packed(Shape((tokens,), (tokens,), 32, 8, 128, dtype=BF16)), Sizes(1, tokens, tokens))
        tiles.add(started[-1][0])
    assert tiles == {128}


def test_what_is_absent_is_null(started: list[Any]) -> None:
    call = paged(Shape((3,), (40,), 4, 2, 64, dtype=BF16), 16)
    call_of(portable.prepare(problem_of(call), H200, 3), call, Sizes(1, 3, 40))
    fields = started[-1][2]
    assert fields[4] == fields[6] == fields[9] == fields[10] == 0  # lse, key_starts, sinks, slopes
    assert fields[5] == call["cu_seqlens_q"].data_ptr()
    assert fields[7] == call["seqused_k"].data_ptr()
    assert fields[8] == call["block_table"].data_ptr()
    assert fields[11:13] == (call["block_table"].stride(0), 0)


def test_slopes_of_each_sequence_have_a_stride(started: list[Any]) -> None:
    call = packed(Shape((3, 2), (4, 5), 4, 2, 64, dtype=BF16))
    for slopes, stride in ((torch.rand(4), 0), (torch.rand(2, 6)[:, :4], 6)):
        call["alibi_slopes"] = slopes
        call_of(portable.prepare(problem_of(call), H200, 3), call, Sizes(2, 3, 5))
        assert started[-1][2][12] == stride


def test_a_tensor_at_an_odd_offset_is_refused(started: list[Any]) -> None:
    shape = Shape((3,), (4,), 4, 2, 64, dtype=BF16)
    call = packed(shape)
    run = portable.prepare(problem_of(call), H200, 3)
    call["value"] = torch.empty(call["value"].numel() + 4, dtype=BF16)[4:].view(call["value"].shape)
    with pytest.raises(InputError, match="value does not start at a multiple of 16 bytes"):
        call_of(run, call, Sizes(1, 3, 4))
    assert not started
