"""Calls of attention over sequences of any lengths, made by the Hopper kernel's own source on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import pytest
import torch
from emulated import compile_emulation
from emulated_launches import EmulatedMap
from emulated_varlen import inputs_of, problem_of

from flashmoe_science.configs.attention import hopper_varlen as configs
from flashmoe_science.configs.attention.hopper_varlen import Extent, HopperVarlenConfiguration
from flashmoe_science.cuda.varlen import hopper, key_maps
from flashmoe_science.varlen.arguments import check_sizes
from flashmoe_science.varlen.problem import Only, Problem, Tensors

Call = dict[str, torch.Tensor]
BLOCKS = 3
"""Of a grid."""


def attend(
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    *,
    wide: bool = False,
    section_mib: int | None = None,
    only: Only = Only.ALL,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of ``call``, with the options of `attention_varlen`. What no block writes stays NaN.

    Args:
        wide: in the tile for long sequences, where there is another.
        section_mib: in place of the configuration's.
    """
    for module in (hopper, key_maps):
        monkeypatch.setattr(module, "TensorMap", EmulatedMap)
    bounds = options.pop("max_seqlen_q"), options.pop("max_seqlen_k")
    problem = dataclasses.replace(problem_of(call, **options), only=only)
    sizes = check_sizes(inputs_of(call), *bounds)
    tile = tile_of(problem, wide)
    if section_mib is not None:
        tile = dataclasses.replace(tile, section_mib=section_mib)
    query = call["query"]
    output = call.get("out")
    if output is None:
        output = query.new_full((query.shape[0], problem.num_heads, problem.value_dim), float("nan"))
    lse = torch.full(query.shape[:2], float("nan"))
    tensors = Tensors(output=output, lse=lse, **{name: call.get(name) for name in _GIVEN})
    buffer = _aligned(hopper.ARGUMENT_BYTES)
    hopper.write_plan(buffer, problem, tile)
    hopper.TensorMaps(buffer, problem, tile).describe(tensors)
    ticket = torch.zeros(1, dtype=torch.int32)
    hopper.write_call(buffer, tensors, sizes, ticket.data_ptr())
    _library(tile, query.dtype).run(buffer, BLOCKS)
    assert ticket.item() == 0, "the next launch would not find its tickets"
    return output, lse


def tile_of(problem: Problem, wide: bool = False) -> HopperVarlenConfiguration:
    """For long sequences, if it is to be wide."""
    extent = Extent(1, 1, (1 << 20) if wide else 1, multiprocessors=1)
    return configs.configuration(problem.head_dim, problem.value_dim, hopper.features(problem), extent)


_GIVEN = tuple(name for name in Tensors._fields if name not in ("output", "lse"))


def _aligned(size: int) -> Any:
    storage = ctypes.create_string_buffer(size + 64)
    return (ctypes.c_char * size).from_buffer(storage, -ctypes.addressof(storage) % 64)


@functools.cache
def _library(tile: HopperVarlenConfiguration, dtype: torch.dtype) -> ctypes.CDLL:
    return compile_emulation(hopper.kernel(tile, dtype), "hopper::Parameters")
