"""The Hopper kernel of attention backward for short sequences: one launch, and no memory but the gradients.

See `kernels/cuda/attention_backward_short.cu`.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

from flashmoe_science.configs.attention import backward_short as configs
from flashmoe_science.configs.attention.backward_short import ShortBackward
from flashmoe_science.cuda.attention.gradients import wgmma
from flashmoe_science.cuda.attention.gradients.problem import BackwardProblem, GradientKind
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.launch import Launch, Launcher, LaunchPlan, loaded
from flashmoe_science.cuda.tensor_map import MAP_BYTES, TensorMap
from flashmoe_science.errors import InputError
from flashmoe_science.jit.nvrtc import CudaKernel

ADDRESSES = struct.Struct("5Q")  # grad_query, grad_key, grad_value, lse, grad_lse
REST = struct.Struct("12q 2f 8i")
ADDRESSES_AT = 5 * MAP_BYTES
_ARGUMENT_BYTES = -(-(ADDRESSES_AT + ADDRESSES.size + REST.size) // 64) * 64


def choose(problem: BackwardProblem, device: Device) -> Choice | None:
    if why_not(problem, device) is not None:
        return None
    return Choice(
        GradientKind.SHORT,
        ShortBackward(problem.causal),
        "TMA and wgmma kernel, a block for all keys of a head",
    )


def why_not(problem: BackwardProblem, device: Device) -> str | None:
    return wgmma.why_not_device(device) or _refusal(problem)


def _refusal(problem: BackwardProblem) -> str | None:
    """Why it cannot do the problem on any GPU."""
    if problem.head_dim > configs.HEAD_DIM:
        return f"head_dim is {problem.head_dim}, and it takes at most {configs.HEAD_DIM}"
    if problem.needs != (True, True, True):
        return "it makes the gradients of queries, keys and values, of which not all are needed"
    if not problem.is_plain:
        return "it takes no window and no cap"
    group = problem.num_heads // problem.num_kv_heads
    if not configs.fits(group=group, seqlen_q=problem.seqlen_q):
        return (
            f"{group} query heads with {problem.seqlen_q} rows share keys, and it has room for "
            f"{configs.BLOCKS * configs.BLOCK_M} rows together, each head's rounded up to {configs.BLOCK_M}"
        )
    queries = problem.batch, problem.num_heads, problem.seqlen_q
    if not wgmma.is_mappable(problem.output_strides, queries):
        return "its tensor maps cannot describe an expanded dimension"
    return wgmma.why_not_problem(problem)


def kernels(architecture: str) -> list[CudaKernel]:
    if not wgmma.built_for(architecture):
        return []
    return [
        kernel(tile, dtype)
        for tile in configs.all_configurations()
        for dtype in (torch.bfloat16, torch.float16)
    ]


def kernel(tile: ShortBackward, dtype: torch.dtype) -> CudaKernel:
    macros = {"HEAD_DIM": tile.head_dim, "CAUSAL": int(tile.causal), **tile.ablation.macros}
    return wgmma.kernel("attention_backward_short", dtype, macros, tile.threads, tile.shared_bytes)


def check(problem: BackwardProblem, configuration: Any) -> None:
    if not isinstance(configuration, ShortBackward):
        raise InputError(
            f"the backward kernel for short sequences takes a ShortBackward, not {configuration!r}"
        )
    wgmma.check_fits(problem, configuration)
    refusal = _refusal(problem)
    if refusal is not None:
        raise InputError(
            f"the backward kernel for short sequences cannot take this: {refusal}; choose another kernel"
        )


def plan(
    problem: BackwardProblem, configuration: Any, device: Device, *, allow_defects: bool = False
) -> LaunchPlan:
    check(problem, configuration)
    tile: ShortBackward = configuration
    kv_heads = problem.batch * problem.num_kv_heads
    main = loaded(
        kernel(tile, problem.dtype),
        device,
        (min(kv_heads, device.multiprocessors), 1, 1),
        _ARGUMENT_BYTES,
        dependent=True,
        allow_defects=allow_defects,
    )
    REST.pack_into(
        main.buffer,
        ADDRESSES_AT + ADDRESSES.size,
        *problem.grad_query_strides,
        *problem.grad_key_strides,
        *problem.grad_value_strides,
        *(problem.num_heads * problem.seqlen_q, problem.seqlen_q, 1),
        problem.softmax_scale,
        problem.softmax_scale * math.log2(math.e),
        problem.seqlen_q,
        problem.seqlen_k,
        problem.num_heads,
        problem.num_kv_heads,
        -(-problem.seqlen_q // configs.BLOCK_M),
        -(-problem.seqlen_k // configs.BLOCK_N),
        kv_heads,
        problem.head_dim,
    )
    maps = wgmma.tensor_maps(
        problem,
        main,
        MAP_BYTES,
        columns=configs.HEAD_DIM,
        query_rows=configs.BLOCK_M,
        key_rows=configs.BLOCK_N,
    )
    of_output = wgmma.row_map(
        problem, main, 4 * MAP_BYTES, problem.output_strides, columns=configs.HEAD_DIM, rows=configs.BLOCK_M
    )
    return LaunchPlan(_launch(main, maps, of_output))


def _launch(main: Launcher, maps: wgmma.Maps, of_output: TensorMap) -> Launch:
    buffer, start, pack = main.buffer, main.start, ADDRESSES.pack_into

    def launch(
        query: int,
        key: int,
        value: int,
        output: int,
        grad_output: int,
        lse: int,
        grad_lse: int,
        grad_query: int,
        grad_key: int,
        grad_value: int,
        stream: int,
    ) -> None:
        wgmma.move(maps, query, key, value, grad_output)
        if of_output.address != output:
            of_output.move(output)
        pack(buffer, ADDRESSES_AT, grad_query, grad_key, grad_value, lse, grad_lse)
        start(stream)

    return launch
