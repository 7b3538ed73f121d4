"""The portable kernels of attention backward: configurations and launches.

Two launches, `kernels/cuda/attention_backward_query.cu` and `attention_backward_key_value.cu`; where the query needs no
gradient, `attention_backward_statistics.cu` takes the place of the first.
"""

from __future__ import annotations

import math
import struct

import torch

from flashmoe_science.configs.attention import backward as configs
from flashmoe_science.configs.attention.backward import KeyValueTile, QueryTile
from flashmoe_science.cuda.attention.backward.problem import BackwardProblem
from flashmoe_science.cuda.device import Device
from flashmoe_science.jit.nvrtc import CudaKernel

POINTERS = struct.Struct("12Q")
"""Addresses of query, key, value, output, grad_output, lse, grad_lse, grad_query, grad_key, grad_value, lse_log2, delta:
the head of `BackwardParameters`. 0 for what there is not.
"""
_REST = struct.Struct("24q 11i 2f")
ARGUMENT_BYTES = -(-(POINTERS.size + _REST.size) // 8) * 8
_NO_MASK = 1 << 30
_L2_SHARE = 0.5  # part of the L2 cache that what one section of heads reads again and again may fill
_NO_SCALE = 1e-30  # stands for a softmax scale of zero: no score counts, and none times it is not a number


def query_kernel(tile: QueryTile, dtype: torch.dtype, architecture: str) -> CudaKernel:
    return _kernel("attention_backward_query", tile, dtype, architecture)


def key_value_kernel(tile: KeyValueTile, dtype: torch.dtype, architecture: str) -> CudaKernel:
    return _kernel("attention_backward_key_value", tile, dtype, architecture)


def statistics_kernel(dtype: torch.dtype, architecture: str) -> CudaKernel:
    return CudaKernel(
        source="attention_backward_statistics.cu",
        function="attention_backward_statistics",
        architecture=architecture,
        macros={"THREADS": configs.STATISTICS_THREADS, "ELEMENT_BF16": int(dtype == torch.bfloat16), "MMA_K": 16},
        threads_per_block=configs.STATISTICS_THREADS,
        dynamic_shared_bytes=0,
    )


def _kernel(name: str, tile: QueryTile | KeyValueTile, dtype: torch.dtype, architecture: str) -> CudaKernel:
    return CudaKernel(
        source=f"{name}.cu",
        function=name,
        architecture=architecture,
        macros={**tile.macros, "ELEMENT_BF16": int(dtype == torch.bfloat16)},
        threads_per_block=tile.threads,
        dynamic_shared_bytes=tile.shared_bytes,
    )


def query_fields(problem: BackwardProblem, tile: QueryTile, device: Device) -> tuple[float, ...]:
    """What follows the addresses in the argument of the pass over queries."""
    heads = problem.batch * problem.num_heads
    # With a causal mask as many heads side by side as the L2 cache holds the keys and values of.
    kv_head_bytes = 2 * max(problem.seqlen_k, 1) * problem.head_dim * problem.dtype.itemsize
    section = int(device.l2_bytes * _L2_SHARE / kv_head_bytes) * (problem.num_heads // problem.num_kv_heads)
    return _fields(problem, problem.seqlen_q, tile.block_m, heads, section, last_first=problem.causal)


def key_value_fields(problem: BackwardProblem, tile: KeyValueTile, device: Device) -> tuple[float, ...]:
    """What follows the addresses in the argument of the pass over keys."""
    heads = problem.batch * problem.num_kv_heads
    group = problem.num_heads // problem.num_kv_heads
    group_bytes = 2 * group * max(problem.seqlen_q, 1) * problem.head_dim * problem.dtype.itemsize
    section = int(device.l2_bytes * _L2_SHARE / group_bytes)
    # The first keys are seen by the most rows.
    return _fields(problem, problem.seqlen_k, tile.block_n, heads, section, last_first=False)


def statistics_fields(problem: BackwardProblem) -> tuple[float, ...]:
    """What follows the addresses in the argument of the kernel that only makes statistics."""
    heads = problem.batch * problem.num_heads
    return _fields(problem, problem.statistics_rows, configs.STATISTICS_THREADS // 4, heads, 1, last_first=False)


def blocks(fields: tuple[float, ...]) -> int:
    """Of the grid that these fields are for."""
    blocks_per_slice, slices = fields[31:33]
    return int(blocks_per_slice * slices)


def pack_fields(buffer: object, fields: tuple[float, ...]) -> None:
    _REST.pack_into(buffer, POINTERS.size, *fields)  # type: ignore[arg-type]


def _fields(
    problem: BackwardProblem, length: int, block: int, heads: int, section: int, *, last_first: bool
) -> tuple[float, ...]:
    element = problem.dtype.itemsize
    strides = (
        problem.query_strides,
        problem.key_strides,
        problem.value_strides,
        problem.output_strides,
        problem.grad_output_strides,
        problem.grad_query_strides,
        problem.grad_key_strides,
        problem.grad_value_strides,
    )
    return (
        *(stride * element for tensor in strides for stride in tensor),
        problem.num_heads,
        problem.num_heads // problem.num_kv_heads,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.head_dim,
        problem.seqlen_k - problem.seqlen_q if problem.causal else _NO_MASK,
        problem.statistics_rows,
        -(-length // block),
        heads,
        min(max(1, section), heads) if problem.causal else 1,
        int(last_first),
        problem.softmax_scale * math.log2(math.e) or _NO_SCALE,
        problem.softmax_scale,
    )
