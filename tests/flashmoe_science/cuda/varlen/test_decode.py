"""The decode kernel without a GPU: its own source, compiled as C++ (../../emulated.py), against float64."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import pytest
import torch
from emulated import NEEDS_COMPILER, compile_emulation
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import H200
from varlen_cases import Call, Shape, bounds, packed, paged
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science.configs.attention.decode import DecodeConfiguration
from flashmoe_science.cuda.varlen import decode
from flashmoe_science.varlen.arguments import Inputs, Options, check, check_sizes
from flashmoe_science.varlen.problem import Problem, Sizes, Tensors

ONE_TOKEN = Shape((1, 1, 1, 1, 1), (300, 1, 0, 129, 16), heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)


@functools.cache
def library(configuration: DecodeConfiguration, dtype: torch.dtype) -> ctypes.CDLL:
    return compile_emulation(decode.kernel(configuration, dtype, "sm_90"), "Parameters")


def inputs_of(call: Call) -> Inputs:
    return Inputs(*(call.get(name) for name in Inputs._fields))  # type: ignore[arg-type]


def run_on_cpu(
    call: Call, options: Options, sizes: tuple[int, int], grid: int = 3, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of the emulated kernel with a grid of so many blocks; both begin as NaN."""
    inputs = inputs_of(call)
    problem = check(inputs, options)
    checked = check_sizes(inputs, *sizes)
    assert decode.why_not(problem, H200) is None
    configuration = dataclasses.replace(decode.configuration_for(problem, checked, H200), **changes)
    shape = (*call["query"].shape[:2], call["value"].shape[-1])
    output = torch.full(shape, torch.nan, dtype=problem.dtype)
    lse = torch.full(shape[:2], torch.nan)
    workspace = torch.full((decode.workspace_bytes(problem, checked, configuration, grid) // 4,), torch.nan)
    arrivals = torch.zeros(grid * configuration.warps, dtype=torch.int32)
    buffer = ctypes.create_string_buffer(decode.ARGUMENT_BYTES)
    decode.write_plan(buffer, problem)
    tensors = Tensors(
        call["query"], call["key"], call["value"], output, lse, *(call.get(n) for n in Tensors._fields[5:])  # type: ignore[arg-type]
    )
    decode.write_call(buffer, tensors, checked, workspace.data_ptr(), arrivals.data_ptr())
    library(configuration, problem.dtype).run(buffer, grid)
    assert not arrivals.any(), "counters are zero after a launch"
    return output, lse


def options(**changes: Any) -> Options:
    return Options(True, (-1, -1), 0.0, None, None, True)._replace(**changes)


@NEEDS_COMPILER
@pytest.mark.parametrize("grid", [1, 3, 16])
@pytest.mark.parametrize("page_size", [0, 1, 16, 48])
def test_one_token_of_each_sequence(page_size: int, grid: int) -> None:
    call = paged(ONE_TOKEN, page_size) if page_size else packed(ONE_TOKEN)
    out, lse = run_on_cpu(call, options(), tuple(bounds(ONE_TOKEN).values()), grid)
    assert_as_exact_as_pytorch(out, lse, call, **bounds(ONE_TOKEN))
