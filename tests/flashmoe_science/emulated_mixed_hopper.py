"""Calls of attention over prompts and decode steps, made by the mixed Hopper kernel's own source on the CPU."""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch
from emulated import compile_emulation
from emulated_decode import inputs_of
from emulated_launches import EmulatedMap
from varlen_cases import Call

from flashmoe_science.configs.attention.mixed_hopper import MixedHopperConfiguration
from flashmoe_science.cuda.varlen import decode_calls, decode_hopper, decode_workspace, hopper, key_maps
from flashmoe_science.cuda.varlen import mixed_hopper as mixed
from flashmoe_science.varlen.arguments import Options, check, check_sizes
from flashmoe_science.varlen.problem import Tensors


@functools.cache
def library(configuration: MixedHopperConfiguration, dtype: torch.dtype) -> ctypes.CDLL:
    return compile_emulation(mixed.kernel(configuration, dtype), "MixedParameters")


def attend(
    call: Call, options: Options, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch, grid: int = 5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of the emulated kernel; both begin as NaN.

    Blocks run one after another, once the first one first and once the last one: what two of them write is the same.
    """
    results = [_attend(call, options, sizes, monkeypatch, grid, run) for run in ("run", "run_last_first")]
    assert all(map(torch.equal, *(map(torch.nan_to_num, each) for each in results)))
    return results[0]


def _attend(
    call: Call,
    options: Options,
    sizes: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    grid: int,
    run: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    for module in (hopper, key_maps):
        monkeypatch.setattr(module, "TensorMap", EmulatedMap)
    inputs = inputs_of(call)
    problem, checked = check(inputs, options), check_sizes(inputs, *sizes)
    configuration = mixed.configuration_for(problem)
    output = torch.full((*call["query"].shape[:2], call["value"].shape[-1]), torch.nan, dtype=problem.dtype)
    lse = torch.full(call["query"].shape[:2], torch.nan)
    workspace = torch.full(
        (decode_workspace.workspace_bytes(problem, checked, configuration.few, grid) // 4,), torch.nan
    )
    counters = decode_workspace.arrival_counters(grid, configuration.few)
    arrivals = torch.zeros(counters + 1, dtype=torch.int32)
    storage = ctypes.create_string_buffer(mixed.ARGUMENT_BYTES + 64)
    buffer = (ctypes.c_char * mixed.ARGUMENT_BYTES).from_buffer(storage, -ctypes.addressof(storage) % 64)
    describe = mixed.write_plan(buffer, problem, configuration, grid)
    given = (call.get(name) for name in Tensors._fields[5:])
    tensors = Tensors(call["query"], call["key"], call["value"], output, lse, *given)  # type: ignore[arg-type]
    describe(tensors)
    hopper.write_call(buffer, tensors, checked, arrivals[counters:].data_ptr())
    few = decode_hopper.arguments_of(buffer, mixed.FEW_AT)
    decode_calls.call_writer(problem)(few, tensors, checked, workspace.data_ptr(), arrivals.data_ptr())
    getattr(library(configuration, problem.dtype), run)(buffer, grid)
    assert not arrivals.any(), "counters are zero after a launch"
    return output, lse
