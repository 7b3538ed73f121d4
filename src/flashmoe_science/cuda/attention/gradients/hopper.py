"""The Hopper kernels of attention backward: configurations, tensor maps and launches.

Three launches: `kernels/cuda/attention_backward_prepare.cu`, `attention_backward_hopper.cu`, and, for the gradient of
the query, `attention_backward_convert.cu`.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

from flashmoe_science.configs.attention import backward_hopper as configs
from flashmoe_science.configs.attention.backward_hopper import HopperBackward
from flashmoe_science.cuda.attention.gradients.problem import BackwardProblem
from flashmoe_science.cuda.attention.problem import KernelKind, Strides
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.driver import load
from flashmoe_science.cuda.launch import Launch, Launcher, LaunchPlan
from flashmoe_science.cuda.tensor_map import MAP_BYTES, TensorMap
from flashmoe_science.cuda.workspace import place
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import base_architecture
from flashmoe_science.jit.nvrtc import CudaKernel, nvrtc_version

_PREPARE = struct.Struct("7Q")  # output, grad_output, lse, grad_lse, lse_log2, delta, turns
_PREPARE_REST = struct.Struct("9q 4i")
_MAIN = struct.Struct("7Q")  # grad_key, grad_value, lse_log2, delta, sums, turns, ticket
_MAIN_REST = struct.Struct("2f 10i 6q")
_MAIN_AT = 4 * MAP_BYTES
_CONVERT = struct.Struct("3Q")  # sums, lse_log2, grad_query
_CONVERT_REST = struct.Struct("3q f 4i 4x")
_FIRST_NVRTC = (12, 9)  # 12.6 and 12.8 serialise wgmma (C7515)
_MOST_HEADS = 65535  # of a grid's second dimension
_MOST_BLOCKS = 1 << 30
_FLOAT_BYTES = 4


def choose(problem: BackwardProblem, device: Device) -> Choice | None:
    if why_not(problem, device) is not None:
        return None
    tile = configs.configuration(problem.head_dim, problem.causal)
    return Choice(KernelKind.HOPPER, tile, "TMA and wgmma kernel, one pass with dQ added in a fixed order")


def why_not(problem: BackwardProblem, device: Device) -> str | None:
    if base_architecture(device.architecture) != "sm_90":
        return f"it needs sm_90, and the GPU is {device.architecture}"
    if device.nvrtc < _FIRST_NVRTC:
        return (
            f"it needs NVRTC {'.'.join(map(str, _FIRST_NVRTC))} or later, and this is "
            f"{'.'.join(map(str, device.nvrtc))}"
        )
    return _refusal(problem)


def _refusal(problem: BackwardProblem) -> str | None:
    """Why it cannot do the problem on any GPU."""
    if configs.configuration(problem.head_dim, problem.causal) is None:
        return f"head_dim is {problem.head_dim}, and it takes at most {configs.HEAD_DIMS[-1]}"
    if problem.softmax_scale <= 0:
        return f"softmax_scale is {problem.softmax_scale:g}, and it needs a positive one"
    if problem.seqlen_q == 0 or problem.seqlen_k == 0:
        return "there are no query rows or no keys"
    if not (problem.needs.key and problem.needs.value):
        return "it makes the gradients of keys and values, of which not both are needed"
    if problem.batch * problem.num_heads > _MOST_HEADS:
        return f"there are more than {_MOST_HEADS} heads in the batch"
    if not _all_mappable(problem):
        return "its tensor maps cannot describe an expanded dimension"
    return None


def _all_mappable(problem: BackwardProblem) -> bool:
    queries = problem.batch, problem.num_heads, problem.seqlen_q
    keys = problem.batch, problem.num_kv_heads, problem.seqlen_k
    return all(
        stride > 0 or size == 1
        for strides, sizes in (
            (problem.query_strides, queries),
            (problem.grad_output_strides, queries),
            (problem.key_strides, keys),
            (problem.value_strides, keys),
        )
        for stride, size in zip(strides, sizes, strict=True)
    )


def kernels(architecture: str) -> list[CudaKernel]:
    if base_architecture(architecture) != "sm_90" or nvrtc_version() < _FIRST_NVRTC:
        return []
    return [
        make(tile, dtype)
        for tile in configs.all_configurations()
        for dtype in (torch.bfloat16, torch.float16)
        for make in (prepare_kernel, main_kernel, convert_kernel)
    ]


def _kernel(
    name: str, dtype: torch.dtype, macros: dict[str, int], threads: int, shared_bytes: int = 0
) -> CudaKernel:
    return CudaKernel(
        source=f"{name}.cu",
        function=name,
        architecture="sm_90a",
        macros={**macros, "ELEMENT_BF16": int(dtype == torch.bfloat16), "MMA_K": 16},
        threads_per_block=threads,
        dynamic_shared_bytes=shared_bytes,
    )


def prepare_kernel(tile: HopperBackward, dtype: torch.dtype) -> CudaKernel:
    macros = {"LANES": tile.lanes, "BLOCK_M": tile.block_m, "PIECES": configs.PIECES}
    return _kernel("attention_backward_prepare", dtype, macros, configs.PREPARE_THREADS)


def main_kernel(tile: HopperBackward, dtype: torch.dtype) -> CudaKernel:
    macros = {"HEAD_DIM": tile.head_dim, "BLOCK_M": tile.block_m, "CAUSAL": int(tile.causal)}
    return _kernel("attention_backward_hopper", dtype, macros, tile.threads, tile.shared_bytes)


def convert_kernel(tile: HopperBackward, dtype: torch.dtype) -> CudaKernel:
    return _kernel("attention_backward_convert", dtype, {"HEAD_DIM": tile.head_dim}, configs.CONVERT_THREADS)


def check(problem: BackwardProblem, configuration: Any) -> None:
    if not isinstance(configuration, HopperBackward):
        raise InputError(f"the Hopper backward kernel takes a HopperBackward, not {configuration!r}")
    if problem.head_dim > configuration.head_dim or problem.causal != configuration.causal:
        raise InputError(
            f"head_dim is {problem.head_dim} and causal {problem.causal}; expected at most the head_dim, and the "
            f"same causal, of {configuration}: choose again"
        )
    refusal = _refusal(problem)
    if refusal is not None:
        raise InputError(f"the Hopper backward kernel cannot take this: {refusal}; choose another kernel")


def plan(
    problem: BackwardProblem, configuration: Any, device: Device, *, allow_defects: bool = False
) -> LaunchPlan:
    check(problem, configuration)
    tile: HopperBackward = configuration
    capturing = torch.cuda.is_current_stream_capturing()
    heads = problem.batch * problem.num_heads
    kv_heads = problem.batch * problem.num_kv_heads
    m_blocks = -(-problem.seqlen_q // tile.block_m)
    n_blocks = -(-problem.seqlen_k // configs.BLOCK_N)
    if kv_heads * n_blocks > _MOST_BLOCKS:
        raise InputError(f"{kv_heads * n_blocks} blocks of keys are more than a grid holds; split the batch")

    def launcher(
        kernel: CudaKernel, grid: tuple[int, int, int], argument_bytes: int, *, dependent: bool
    ) -> Launcher:
        function = load(kernel, device.index, capturing, allow_defects=allow_defects)
        return Launcher(function, grid, kernel, argument_bytes, dependent=dependent)

    # The first waits for all that came before; the others may start early, and wait where they read what it or the
    # one before them wrote.
    rows_per_block = configs.PREPARE_THREADS // tile.lanes * configs.PREPARE_DEPTH
    prepare = launcher(
        prepare_kernel(tile, problem.dtype),
        (m_blocks * tile.block_m // rows_per_block, heads, 1),
        _PREPARE.size + _PREPARE_REST.size,
        dependent=False,
    )
    element = problem.dtype.itemsize
    _PREPARE_REST.pack_into(
        prepare.buffer,
        _PREPARE.size,
        *(stride * element for stride in (*problem.output_strides, *problem.grad_output_strides)),
        *(problem.num_heads * problem.seqlen_q, problem.seqlen_q, 1),
        problem.num_heads,
        problem.seqlen_q,
        m_blocks,
        problem.head_dim,
    )

    main = launcher(
        main_kernel(tile, problem.dtype),
        (min(kv_heads * n_blocks, device.multiprocessors), 1, 1),
        -(-(_MAIN_AT + _MAIN.size + _MAIN_REST.size) // 64) * 64,
        dependent=True,
    )
    rows = problem.num_heads // problem.num_kv_heads * problem.seqlen_q
    _MAIN_REST.pack_into(
        main.buffer,
        _MAIN_AT + _MAIN.size,
        problem.softmax_scale,
        problem.softmax_scale * math.log2(math.e),
        problem.seqlen_q,
        problem.seqlen_k,
        problem.num_heads,
        problem.num_kv_heads,
        m_blocks,
        n_blocks,
        kv_heads,
        min(configs.key_heads_per_section(rows, problem.head_dim), kv_heads),
        kv_heads * n_blocks,
        problem.head_dim,
        *problem.grad_key_strides,
        *problem.grad_value_strides,
    )

    convert = None
    if problem.needs.query:
        convert = launcher(
            convert_kernel(tile, problem.dtype),
            (m_blocks, heads, 1),
            _CONVERT.size + _CONVERT_REST.size,
            dependent=True,
        )
        _CONVERT_REST.pack_into(
            convert.buffer,
            _CONVERT.size,
            *(stride * element for stride in problem.grad_query_strides),
            problem.softmax_scale,
            problem.num_heads,
            problem.seqlen_q,
            m_blocks,
            problem.head_dim,
        )

    def tensor_map(index: int, heads: int, rows: int, strides: Strides, box_rows: int) -> TensorMap:
        return TensorMap(
            main.buffer,
            index * MAP_BYTES,
            problem.dtype,
            (problem.head_dim, rows, heads, problem.batch),
            (strides[2], strides[1], strides[0]),
            (configs.SWIZZLE_PANEL, box_rows),
        )

    queries = problem.num_heads, problem.seqlen_q
    keys = problem.num_kv_heads, problem.seqlen_k
    maps = (
        tensor_map(0, *queries, problem.query_strides, tile.block_m),
        tensor_map(1, *keys, problem.key_strides, configs.BLOCK_N),
        tensor_map(2, *keys, problem.value_strides, configs.BLOCK_N),
        tensor_map(3, *queries, problem.grad_output_strides, tile.block_m),
    )
    statistics = heads * m_blocks * tile.block_m * _FLOAT_BYTES
    pieces = heads * m_blocks * configs.PIECES
    *parts, workspace = place(
        statistics, statistics, (pieces + 1) * _FLOAT_BYTES, pieces * configs.PIECE_FLOATS * _FLOAT_BYTES
    )
    return LaunchPlan(_launch(prepare, main, convert, maps, parts, pieces * _FLOAT_BYTES), workspace)


def _launch(
    prepare: Launcher,
    main: Launcher,
    convert: Launcher | None,
    maps: tuple[TensorMap, TensorMap, TensorMap, TensorMap],
    parts: list[int],
    ticket_at: int,
) -> Launch:
    """
    Args:
        maps: of query, key, value and grad_output; re-addressed when their tensor moved.
        parts: where lse_log2, delta, turns and sums begin in the workspace, in bytes.
        ticket_at: where the ticket is behind the first of the turns, in bytes.
    """
    of_query, of_key, of_value, of_gradient = maps
    _, delta_at, turns_at, sums_at = parts
    prepare_buffer, start_prepare, pack_prepare = prepare.buffer, prepare.start, _PREPARE.pack_into
    main_buffer, start_main, pack_main = main.buffer, main.start, _MAIN.pack_into
    pack_convert = _CONVERT.pack_into

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
        workspace: int,
        stream: int,
    ) -> None:
        delta, turns, sums = workspace + delta_at, workspace + turns_at, workspace + sums_at
        pack_prepare(prepare_buffer, 0, output, grad_output, lse, grad_lse, workspace, delta, turns)
        start_prepare(stream)
        if of_query.address != query:
            of_query.move(query)
        if of_key.address != key:
            of_key.move(key)
        if of_value.address != value:
            of_value.move(value)
        if of_gradient.address != grad_output:
            of_gradient.move(grad_output)
        pack_main(
            main_buffer, _MAIN_AT, grad_key, grad_value, workspace, delta, sums, turns, turns + ticket_at
        )
        start_main(stream)
        if convert is not None:
            pack_convert(convert.buffer, 0, sums, workspace, grad_query)
            convert.start(stream)

    return launch
