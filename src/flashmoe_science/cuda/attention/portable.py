"""The portable attention kernel (`kernels/cuda/attention_portable.cu`): configurations and launches."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

from flashmoe_science.configs.attention import portable as configs
from flashmoe_science.configs.attention.portable import PortableConfiguration
from flashmoe_science.cuda.attention.problem import KernelKind, Problem
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device, element_types, why_not_type
from flashmoe_science.cuda.launch import ADDRESSES, LaunchPlan, loaded
from flashmoe_science.errors import InputError
from flashmoe_science.jit.nvrtc import CudaKernel

_REST = struct.Struct("12q 10i f I")  # the fields of AttentionParameters after the pointers
_ARGUMENT_BYTES = -(-(ADDRESSES.size + _REST.size) // 8) * 8
_NO_MASK = 1 << 30
_MOST_BLOCKS = 1 << 31
_SCHEDULERS = 4  # of a multiprocessor; each issues one warp's instructions
_L2_SHARE = 0.5  # part of the L2 cache that the keys and values of one section of heads may fill


def choose(problem: Problem, device: Device) -> Choice | None:
    """The tall tile where it gives every scheduler of every multiprocessor a warp, else the short one."""
    if why_not(problem, device) is not None:
        return None
    tall = configs.tall(device.architecture, problem.head_dim, problem.causal, problem.seqlen_k)
    short = configs.short(device.architecture, problem.head_dim)
    blocks = problem.batch * problem.num_heads * -(-problem.seqlen_q // tall.block_m)
    needed = device.multiprocessors * _SCHEDULERS // min(tall.warps, _SCHEDULERS)
    if blocks < needed and short != tall:
        return Choice(
            KernelKind.PORTABLE,
            short,
            f"{blocks} blocks of {tall.block_m} rows would not fill {device.multiprocessors} multiprocessors",
        )
    return Choice(KernelKind.PORTABLE, tall, "mma.sync kernel with the tile for many rows")


def why_not(problem: Problem, device: Device) -> str | None:
    return why_not_type(problem.dtype, device)


def kernels(architecture: str) -> list[CudaKernel]:
    return [
        kernel(configuration, dtype, architecture)
        for configuration in configs.all_configurations(architecture)
        for dtype in element_types(architecture)
    ]


def kernel(configuration: PortableConfiguration, dtype: torch.dtype, architecture: str) -> CudaKernel:
    """The kernel in one configuration, which may be another architecture's."""
    return CudaKernel(
        source="attention_portable.cu",
        function="attention_portable",
        architecture=architecture,
        macros={
            "HEAD_DIM": configuration.head_dim,
            "BLOCK_M": configuration.block_m,
            "BLOCK_N": configuration.block_n,
            "WARPS": configuration.warps,
            "MIN_BLOCKS": configuration.min_blocks,
            "QUERY_STEPS": configuration.query_steps,
            "OVERLAP": int(configuration.overlap),
            "ELEMENT_BF16": int(dtype == torch.bfloat16),
            "NATIVE_CP_ASYNC": int(configuration.cp_async),
            "MMA_K": configuration.mma_k,
            **configuration.ablation.macros,
        },
        threads_per_block=configuration.threads,
        dynamic_shared_bytes=configuration.shared_bytes,
    )


def check(problem: Problem, configuration: Any) -> None:
    if not isinstance(configuration, PortableConfiguration):
        raise InputError(f"the portable kernel takes a PortableConfiguration, not {configuration!r}")
    if problem.head_dim > configuration.head_dim:
        raise InputError(
            f"head_dim is {problem.head_dim}; expected at most the {configuration.head_dim} "
            f"of the tile ({configuration.label}): choose again"
        )


def plan(problem: Problem, configuration: Any, device: Device, *, allow_defects: bool = False) -> LaunchPlan:
    check(problem, configuration)
    compiled = kernel(configuration, problem.dtype, device.architecture)
    row_blocks = -(-problem.seqlen_q // configuration.block_m)
    slices = problem.batch * problem.num_heads
    if row_blocks * slices >= _MOST_BLOCKS:
        raise InputError(
            f"{row_blocks * slices} blocks of query rows are more than a grid holds; split the batch"
        )
    launcher = loaded(
        compiled, device, (row_blocks * slices, 1, 1), _ARGUMENT_BYTES, allow_defects=allow_defects
    )
    _REST.pack_into(launcher.buffer, ADDRESSES.size, *_fields(problem, configuration, device))
    return LaunchPlan(launcher.start_at)


def _fields(problem: Problem, configuration: PortableConfiguration, device: Device) -> tuple[float, ...]:
    element = problem.dtype.itemsize
    strides = (problem.query_strides, problem.key_strides, problem.value_strides, problem.output_strides)
    # A negative scale flips the query's signs, so that the kernel's scale, and with it the row maximum, stays
    # positive.
    scale = abs(problem.softmax_scale) * math.log2(math.e)
    flip = 0x80008000 if problem.softmax_scale < 0 else 0
    return (
        *(stride * element for tensor in strides for stride in tensor),
        problem.num_heads,
        problem.num_heads // problem.num_kv_heads,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.head_dim,
        problem.seqlen_k - problem.seqlen_q if problem.causal else _NO_MASK,
        int(problem.causal),
        -(-problem.seqlen_q // configuration.block_m),
        problem.batch * problem.num_heads,
        _slices_per_section(problem, device),
        scale,
        flip,
    )


def _slices_per_section(problem: Problem, device: Device) -> int:
    """How many heads are worked on side by side.

    One where all tiles cost the same. With a causal mask as many as the L2 cache holds the keys and values
    of, so that the longest tiles of all of them start first.
    """
    if not problem.causal:
        return 1
    kv_head_bytes = 2 * max(problem.seqlen_k, 1) * problem.head_dim * problem.dtype.itemsize
    kv_heads = max(1, int(device.l2_bytes * _L2_SHARE / kv_head_bytes))
    return min(kv_heads * (problem.num_heads // problem.num_kv_heads), problem.batch * problem.num_heads)
