"""Calls of attention over sequences of any lengths, made by the CUDA kernel's own source on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import torch
from emulated import compile_emulation

from flashmoe_science.configs.attention.varlen import Tiles, VarlenConfiguration, tiles
from flashmoe_science.cuda.varlen import dense, portable
from flashmoe_science.cuda.varlen.arguments import ARGUMENT_BYTES, PER_CALL, TREE_MASK, TREE_MASK_AT
from flashmoe_science.varlen.arguments import Inputs, Options, check, check_sizes
from flashmoe_science.varlen.problem import Only, Problem

Call = dict[str, torch.Tensor]


def problem_of(call: Call, **options: Any) -> Problem:
    return check(inputs_of(call), _options(options))


def attend(
    call: Call, *, short: bool = False, only: Only = Only.ALL, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of ``call``, with the options of `attention_varlen`, in either tile of sm_86.

    What no block writes stays NaN.
    """
    bounds = options.pop("max_seqlen_q"), options.pop("max_seqlen_k")
    problem = dataclasses.replace(problem_of(call, **options), only=only)
    sizes = check_sizes(inputs_of(call), *bounds)
    both: Tiles = tiles("sm_86", problem.head_dim, problem.value_dim, portable.features(problem))
    tile = both.short if short else both.tall
    query = call["query"]
    tokens = query.shape[0]
    output = call.get("out")
    if output is None:
        output = query.new_full((tokens, problem.num_heads, problem.value_dim), float("nan"))
    lse = torch.full((tokens, problem.num_heads), float("nan"))
    arguments = portable.plan_arguments(problem)
    buffer = ctypes.create_string_buffer(ARGUMENT_BYTES)
    arguments.pack_into(buffer)
    num_tiles = portable.tile_bound(tokens * portable.rows_per_token(problem), sizes.batch, tile.block_m)
    table, slopes = call.get("block_table"), call.get("alibi_slopes")
    PER_CALL.pack_into(
        buffer,
        0,
        *(tensor.data_ptr() for tensor in (query, call["key"], call["value"], output, lse)),
        call["cu_seqlens_q"].data_ptr(),
        *(_address(call.get(name)) for name in ("cu_seqlens_k", "seqused_k", "block_table", "sinks")),
        _address(slopes),
        0 if table is None else table.stride(0),
        slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        sizes.batch,
        tokens,
        num_tiles,
        1 + arguments.num_slices // 2,  # sections of unequal size
    )
    TREE_MASK.pack_into(buffer, TREE_MASK_AT, _address(call.get("tree_mask")))
    _library(tile, query.dtype).run(buffer, num_tiles * arguments.num_slices)
    return output, lse


def attend_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `cuda.varlen.dense.forward` computes, in the short tile of sm_86."""
    batch, heads, seqlen_q, head_dim = query.shape
    kv_heads = key.shape[1]
    tile = tiles("sm_86", head_dim, head_dim, dense.features(query, key, window, softcap)).short
    output, lse = torch.full_like(query, float("nan")), torch.full((batch, heads, seqlen_q), float("nan"))
    arguments = dense.plan_arguments(query, key, value, output, tile.block_m, window, softcap, softmax_scale)
    buffer = ctypes.create_string_buffer(ARGUMENT_BYTES)
    arguments.pack_into(buffer)
    num_tiles = arguments.tiles_per_sequence * batch
    addresses = [tensor.data_ptr() for tensor in (query, key, value, output, lse)]
    call = dense.per_call(batch, seqlen_q, num_tiles, kv_heads)
    PER_CALL.pack_into(buffer, 0, *addresses, 0, 0, 0, 0, _address(sinks), 0, *call)
    _library(tile, query.dtype).run(buffer, num_tiles * kv_heads)
    return output, lse


@functools.cache
def _library(tile: VarlenConfiguration, dtype: torch.dtype) -> ctypes.CDLL:
    return compile_emulation(portable.kernel(tile, dtype, "sm_86"), "VarlenParameters")


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def inputs_of(call: Call) -> Inputs:
    return Inputs(**{name: call.get(name) for name in Inputs._fields})  # type: ignore[arg-type]


def _options(options: dict[str, Any]) -> Options:
    usual = {"causal": True, "window": (-1, -1), "softcap": 0.0, "softmax_scale": None, "split_keys": None}
    return Options(**{**usual, **options}, return_lse=True)
