"""Gradients of the routing weights from their parts (`moe_backward_routing.cu`) and of experts' biases, and what the
bias of w2 adds to the former (`moe_backward_bias.cu`, `moe_backward_bias_routing.cu`). All sum in a fixed order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch

from flashmoe_science.cuda.launch import Launcher, addressed
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.jit.limits import overlaps
from flashmoe_science.jit.nvrtc import CudaKernel

_HOPPER = "sm_90a"

# rows, topk_weights, output, expert_offsets, sorted_slots
_ADDRESSES = struct.Struct("5Q")
_REST = struct.Struct("6i")
_THREADS, _COLUMNS = 256, 64
# grad_output, bias, ids, expert_offsets, sorted_slots, output
_ROUTING = struct.Struct("6Q")
_ROUTING_REST = struct.Struct("3i")
_ROUTING_ROWS = 8  # of a block

# sums, ids, expert_offsets, sorted_slots, output
_PARTS = struct.Struct("5Q")
_PARTS_REST = struct.Struct("3i")

LauncherOf = Callable[[CudaKernel, int, int], Launcher]
"""Makes the launcher of a kernel, given the bytes of its arguments and the blocks of its grid."""


def kernel(dtype: torch.dtype, *, second: bool, architecture: str = _HOPPER) -> CudaKernel:
    """Gradient of the bias of w2 (`second`) or of w13."""
    return CudaKernel(
        source="moe_backward_bias.cu",
        function="moe_backward_bias",
        architecture=architecture,
        macros={
            "GATHER": int(second),
            "DEPENDENT": int(overlaps(architecture)),
            "ELEMENT_BF16": int(dtype == torch.bfloat16),
            "MMA_K": 16,
        },
        threads_per_block=_THREADS,
        dynamic_shared_bytes=0,
    )


def parts_kernel(ids64: bool, *, architecture: str = _HOPPER) -> CudaKernel:
    """Gradient of the routing weights, from its parts."""
    return CudaKernel(
        source="moe_backward_routing.cu",
        function="moe_backward_routing",
        architecture=architecture,
        macros={"IDS64": int(ids64), "DEPENDENT": int(overlaps(architecture))},
        threads_per_block=_THREADS,
        dynamic_shared_bytes=0,
    )


def routing_kernel(dtype: torch.dtype, ids64: bool, *, architecture: str = _HOPPER) -> CudaKernel:
    """What the bias of w2 adds to the gradient of the routing weights."""
    return CudaKernel(
        source="moe_backward_bias_routing.cu",
        function="moe_backward_bias_routing",
        architecture=architecture,
        macros={
            "IDS64": int(ids64),
            "DEPENDENT": int(overlaps(architecture)),
            "ELEMENT_BF16": int(dtype == torch.bfloat16),
            "MMA_K": 16,
        },
        threads_per_block=32 * _ROUTING_ROWS,
        dynamic_shared_bytes=0,
    )


def sum_of_parts(
    launcher_of: LauncherOf, problem: MoeProblem, parts: int, *, architecture: str = _HOPPER
) -> Callable[..., None]:
    """Launches that write the gradient of the routing weights, of which each slot has so many parts."""
    compiled = parts_kernel(problem.ids64, architecture=architecture)
    launcher = launcher_of(compiled, _PARTS.size + _PARTS_REST.size, -(-problem.slots // _THREADS))
    _PARTS_REST.pack_into(launcher.buffer, _PARTS.size, parts, problem.slots, problem.experts)
    return addressed(launcher, _PARTS)


def gradient_of_routing(
    launcher_of: LauncherOf, problem: MoeProblem, *, architecture: str = _HOPPER
) -> Callable[..., None]:
    """Launches that add what the bias of w2 has in the gradient of the routing weights."""
    compiled = routing_kernel(problem.dtype, problem.ids64, architecture=architecture)
    blocks = -(-problem.slots // _ROUTING_ROWS)
    launcher = launcher_of(compiled, _ROUTING.size + _ROUTING_REST.size, blocks)
    _ROUTING_REST.pack_into(launcher.buffer, _ROUTING.size, problem.hidden, problem.top_k, problem.experts)
    return addressed(launcher, _ROUTING)


def gradient(
    launcher_of: LauncherOf, problem: MoeProblem, *, second: bool, architecture: str = _HOPPER
) -> Callable[..., None]:
    """Launches that write the gradient of the bias of w2 (`second`) or of w13.

    The rows that are added for w13 are all gates, then all ups; the problem's layout says where each sum goes.
    """
    columns = problem.hidden if second else problem.w13_rows
    tiles = -(-columns // _COLUMNS)
    compiled = kernel(problem.dtype, second=second, architecture=architecture)
    launcher = launcher_of(compiled, _ADDRESSES.size + _REST.size, problem.experts * tiles)
    _REST.pack_into(
        launcher.buffer,
        _ADDRESSES.size,
        columns,
        tiles,
        columns if second else problem.intermediate,
        *((1, 0) if second else problem.w13_bias_strides),
        problem.top_k,
    )
    return addressed(launcher, _ADDRESSES)
