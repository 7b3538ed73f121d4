"""Calls of attention over sequences of any lengths, made by the Hopper decode kernel's own source on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import pytest
import torch
from emulated import compile_emulation
from emulated_decode import inputs_of
from emulated_launches import EmulatedMap
from varlen_cases import Call

from flashmoe_science.configs.attention.decode_hopper import TILE_KEYS, DecodeHopperConfiguration
from flashmoe_science.cuda.varlen import decode_calls, decode_hopper, decode_workspace, key_maps
from flashmoe_science.cuda.varlen.key_maps import KeyMaps
from flashmoe_science.varlen.arguments import Options, check, check_sizes
from flashmoe_science.varlen.problem import Only, Tensors
from problems import H200

_MOST_AT_A_TIME = 16
"""Blocks whose copies the emulation has room for."""


@functools.cache
def library(configuration: DecodeHopperConfiguration, dtype: torch.dtype) -> ctypes.CDLL:
    return compile_emulation(decode_hopper.kernel(configuration, dtype), "HopperParameters", together=True)


def attend(
    call: Call,
    options: Options,
    sizes: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    grid: int = 3,
    team: int = 1,
    parts: int = 1,
    at_a_time: int = 0,
    launches: int = 1,
    only: Only = Only.ALL,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of the emulated kernel; both begin as NaN.

    Args:
        grid: blocks, or clusters of ``parts`` blocks.
        at_a_time: so many blocks, which finish sets together, in place of one (or one cluster) after another; with
            ``parts`` 1.
        launches: one after another, with the same workspace and counters.
    """
    monkeypatch.setattr(key_maps, "TensorMap", EmulatedMap)
    inputs = inputs_of(call)
    problem = check(inputs, options)
    checked = check_sizes(inputs, *sizes)
    chosen = decode_hopper.configuration_for(problem, checked, H200)
    configuration = dataclasses.replace(chosen, parts=parts, together=at_a_time > 0, only=only)
    output = torch.full((*call["query"].shape[:2], call["value"].shape[-1]), torch.nan, dtype=problem.dtype)
    lse = torch.full(call["query"].shape[:2], torch.nan)
    workspace = torch.full(
        (decode_workspace.workspace_bytes(problem, checked, configuration, grid * parts) // 4,), torch.nan
    )
    arrivals = torch.zeros(decode_workspace.arrival_counters(grid * parts, configuration), dtype=torch.int32)
    storage = ctypes.create_string_buffer(decode_hopper.ARGUMENT_BYTES + 64)
    start = -ctypes.addressof(storage) % 64
    buffer = (ctypes.c_char * decode_hopper.ARGUMENT_BYTES).from_buffer(storage, start)
    arguments = decode_hopper.arguments_of(buffer)
    decode_calls.write_plan(arguments, problem, grid, team, TILE_KEYS)
    given = (call.get(name) for name in Tensors._fields[5:])
    tensors = Tensors(call["query"], call["key"], call["value"], output, lse, *given)  # type: ignore[arg-type]
    decode_calls.call_writer(problem)(arguments, tensors, checked, workspace.data_ptr(), arrivals.data_ptr())
    if not configuration.gathered:
        KeyMaps(buffer, 0, problem, configuration.box_rows, read_once=True).describe(tensors)
    blocks = grid * parts
    assert at_a_time <= _MOST_AT_A_TIME
    for _ in range(launches):
        output.fill_(torch.nan)
        if at_a_time:
            library(configuration, problem.dtype).run_together(buffer, blocks, 1, at_a_time)
        else:
            library(configuration, problem.dtype).run(buffer, blocks)
        assert not arrivals.any(), "counters are zero after a launch"
    return output, lse
