"""Calls of attention over sequences of any lengths, made by the decode kernel's own source on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import torch
from emulated import compile_clusters, compile_emulation
from varlen_cases import Call

from flashmoe_science.configs.attention.decode import DecodeConfiguration
from flashmoe_science.cuda.varlen import decode, decode_calls, decode_workspace
from flashmoe_science.varlen.arguments import Inputs, Options, check, check_sizes
from flashmoe_science.varlen.problem import Tensors
from problems import H200


@functools.cache
def library(configuration: DecodeConfiguration, dtype: torch.dtype) -> ctypes.CDLL:
    kernel = decode.kernel(configuration, dtype, "sm_90")
    return compile_clusters(kernel) if configuration.cluster > 1 else compile_emulation(kernel, "Parameters")


def inputs_of(call: Call) -> Inputs:
    return Inputs(*(call.get(name) for name in Inputs._fields))  # type: ignore[arg-type]


def run_on_cpu(
    call: Call,
    options: Options,
    sizes: tuple[int, int],
    grid: int = 3,
    memory: tuple[torch.Tensor, torch.Tensor] | None = None,
    team: int = 1,
    **changes: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of the emulated kernel with a grid of so many blocks; both begin as NaN.

    Args:
        memory: workspace, and counters, which other launches may have used; new ones unless given.
    """
    inputs = inputs_of(call)
    problem = check(inputs, options)
    checked = check_sizes(inputs, *sizes)
    configuration = dataclasses.replace(
        decode.configuration_for(problem, checked, H200), **{"cluster": 1, **changes}
    )
    assert grid % configuration.cluster == 0
    shape = (*call["query"].shape[:2], call["value"].shape[-1])
    output = torch.full(shape, torch.nan, dtype=problem.dtype)
    lse = torch.full(shape[:2], torch.nan)
    if memory is None:
        size = decode_workspace.workspace_bytes(problem, checked, configuration, grid)
        counters = decode_workspace.arrival_counters(grid, configuration)
        memory = torch.full((size // 4,), torch.nan), torch.zeros(counters, dtype=torch.int32)
    workspace, arrivals = memory
    buffer = ctypes.create_string_buffer(decode_calls.ARGUMENT_BYTES)
    decode_calls.write_plan(buffer, problem, grid, team)
    tensors = Tensors(
        call["query"],
        call["key"],
        call["value"],
        output,
        lse,
        *(call.get(n) for n in Tensors._fields[5:]),  # type: ignore[arg-type]
    )
    decode_calls.call_writer(problem)(buffer, tensors, checked, workspace.data_ptr(), arrivals.data_ptr())
    library(configuration, problem.dtype).run(buffer, grid, *((1, 1, 0) if configuration.cluster > 1 else ()))
    assert not arrivals.any(), "counters are zero after a launch"
    return output, lse


def options(**changes: Any) -> Options:
    return Options(True, (-1, -1), 0.0, None, None, True)._replace(**changes)
