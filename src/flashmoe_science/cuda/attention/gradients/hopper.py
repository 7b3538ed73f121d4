"""The Hopper kernels of attention backward: configurations, tensor maps and launches.

Launches: `kernels/cuda/attention_backward_prepare.cu`, `attention_backward_hopper.cu`, and, where the latter does not
make the gradient of the query, `attention_backward_convert.cu`.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable
from typing import Any

import torch

from flashmoe_science.configs.attention import backward_hopper as configs
from flashmoe_science.configs.attention.backward_hopper import HopperBackward
from flashmoe_science.cuda.attention.gradients import wgmma
from flashmoe_science.cuda.attention.gradients.problem import BackwardProblem, GradientKind
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.driver import has_default_priority
from flashmoe_science.cuda.launch import Launch, Launcher, LaunchPlan, loaded
from flashmoe_science.cuda.tensor_map import MAP_BYTES, TensorMap
from flashmoe_science.cuda.workspace import place
from flashmoe_science.errors import CaptureError, InputError
from flashmoe_science.jit.nvrtc import CudaKernel

_MAIN = struct.Struct("7Q")  # grad_key, grad_value, lse_log2, delta, sums, turns, ticket
_MAIN_REST = struct.Struct("2f 10i 6q i 4x")
_MAIN_AT = 5 * MAP_BYTES
_CONVERT = struct.Struct("3Q")  # sums, lse_log2, grad_query
_CONVERT_REST = struct.Struct("3q f 4i 4x")
_MOST_BLOCKS = 1 << 30
_FLOAT_BYTES = 4


def choose(problem: BackwardProblem, device: Device) -> Choice | None:
    if why_not(problem, device) is not None:
        return None
    tile = configs.configuration(
        problem.head_dim,
        problem.causal,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        query=problem.needs.query,
        window=problem.window_left >= 0,
    )
    return Choice(GradientKind.HOPPER, tile, "TMA and wgmma kernel, one pass with dQ added in a fixed order")


def why_not(problem: BackwardProblem, device: Device) -> str | None:
    return wgmma.why_not_device(device) or _refusal(problem)


def _refusal(problem: BackwardProblem) -> str | None:
    """Why it cannot do the problem on any GPU."""
    if problem.head_dim > configs.HEAD_DIMS[-1]:
        return f"head_dim is {problem.head_dim}, and it takes at most {configs.HEAD_DIMS[-1]}"
    if not (problem.needs.key and problem.needs.value):
        return "it makes the gradients of keys and values, of which not both are needed"
    if problem.softcap != 0:
        return "it takes no cap"
    if problem.window_right >= 0 or (problem.window_left >= 0 and not problem.causal):
        return "it takes a window only with a causal mask"
    return wgmma.why_not_problem(problem)


def kernels(architecture: str) -> list[CudaKernel]:
    if not wgmma.built_for(architecture):
        return []
    return [
        make(tile, dtype)
        for tile in configs.all_configurations()
        for dtype in (torch.bfloat16, torch.float16)
        for make in (prepare_kernel, main_kernel, _drawing_kernel, convert_kernel)
        if make is not _drawing_kernel or not tile.staggered
    ]


def _drawing_kernel(tile: HopperBackward, dtype: torch.dtype) -> CudaKernel:
    return main_kernel(tile, dtype, draws_first=True)


def prepare_kernel(tile: HopperBackward, dtype: torch.dtype) -> CudaKernel:
    return wgmma.prepare_kernel(dtype, lanes=tile.lanes, block_m=tile.block_m, pieces=configs.PIECES)


def main_kernel(tile: HopperBackward, dtype: torch.dtype, *, draws_first: bool = False) -> CudaKernel:
    """`draws_first`: a block's first tile is drawn as well, so that blocks need not be on the GPU together."""
    macros = {
        "HEAD_DIM": tile.head_dim,
        "BLOCK_M": tile.block_m,
        "CAUSAL": int(tile.causal),
        "WINDOW": int(tile.window),
        "CONVERTS": int(tile.converts),
        "STAGGERED": int(tile.staggered),
        "DRAWS_FIRST": int(draws_first),
        **tile.ablation.macros,
    }
    return wgmma.kernel("attention_backward_hopper", dtype, macros, tile.threads, tile.shared_bytes)


def convert_kernel(tile: HopperBackward, dtype: torch.dtype) -> CudaKernel:
    return wgmma.kernel(
        "attention_backward_convert",
        dtype,
        {"HEAD_DIM": tile.head_dim, "BLOCK_M": tile.block_m},
        tile.convert_threads,
    )


def check(problem: BackwardProblem, configuration: Any) -> None:
    if not isinstance(configuration, HopperBackward):
        raise InputError(f"the Hopper backward kernel takes a HopperBackward, not {configuration!r}")
    wgmma.check_fits(problem, configuration)
    convertible = problem.causal and problem.needs.query
    if (
        (configuration.converts and (not convertible or configuration.wide))
        or (configuration.staggered and problem.causal)
        or (configuration.wide and configuration.head_dim != 128)
        or configuration.window != (problem.causal and problem.window_left >= 0)
        or (configuration.window and configuration.wide)
    ):
        raise InputError(f"{configuration} was chosen for another problem: choose again")
    refusal = _refusal(problem)
    if refusal is not None:
        raise InputError(f"the Hopper backward kernel cannot take this: {refusal}; choose another kernel")


def plan(
    problem: BackwardProblem, configuration: Any, device: Device, *, allow_defects: bool = False
) -> LaunchPlan:
    check(problem, configuration)
    tile: HopperBackward = configuration
    heads = problem.batch * problem.num_heads
    kv_heads = problem.batch * problem.num_kv_heads
    m_blocks = -(-problem.seqlen_q // tile.block_m)
    n_blocks = -(-problem.seqlen_k // configs.BLOCK_N)
    if kv_heads * n_blocks > _MOST_BLOCKS:
        raise InputError(f"{kv_heads * n_blocks} blocks of keys are more than a grid holds; split the batch")

    if tile.staggered and n_blocks > device.multiprocessors:
        raise InputError(
            f"{n_blocks} staggered tiles would wait for ever on {device.multiprocessors} multiprocessors"
        )

    prepare = wgmma.prepare_launcher(
        problem,
        device,
        lanes=tile.lanes,
        block_m=tile.block_m,
        pieces=configs.PIECES,
        allow_defects=allow_defects,
    )

    def load_main(*, draws_first: bool = False) -> Launcher:
        return loaded(
            main_kernel(tile, problem.dtype, draws_first=draws_first),
            device,
            (min(kv_heads * n_blocks, device.multiprocessors), 1, 1),
            -(-(_MAIN_AT + _MAIN.size + _MAIN_REST.size) // 64) * 64,
            dependent=True,
            allow_defects=allow_defects,
        )

    main = load_main()
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
        min(configs.key_heads_per_section(tile, rows, problem.head_dim), kv_heads),
        kv_heads * n_blocks,
        problem.head_dim,
        *problem.grad_key_strides,
        *problem.grad_value_strides,
        min(problem.window_left, problem.seqlen_k),
    )

    element = problem.dtype.itemsize
    convert = None
    if problem.needs.query and not tile.converts:
        convert = loaded(
            convert_kernel(tile, problem.dtype),
            device,
            (m_blocks, heads, 1),
            _CONVERT.size + _CONVERT_REST.size,
            dependent=True,
            allow_defects=allow_defects,
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

    maps = wgmma.tensor_maps(
        problem,
        main,
        MAP_BYTES,
        columns=configs.SWIZZLE_PANEL,
        query_rows=tile.block_m,
        key_rows=configs.BLOCK_N,
    )
    converted = wgmma.grad_query_map(problem, main, 4 * MAP_BYTES) if tile.converts else None
    statistics = heads * m_blocks * tile.block_m * _FLOAT_BYTES
    pieces = heads * m_blocks * configs.PIECES
    *parts, workspace = place(
        statistics, statistics, (pieces + 1) * _FLOAT_BYTES, pieces * tile.piece_floats * _FLOAT_BYTES
    )
    drawing = None if tile.staggered else functools.cache(functools.partial(load_main, draws_first=True))
    launch = _launch(prepare, main, drawing, convert, maps, parts, pieces * _FLOAT_BYTES, converted)
    return LaunchPlan(launch, workspace)


def _launch(
    prepare: Launcher,
    main: Launcher,
    drawing: Callable[[], Launcher] | None,
    convert: Launcher | None,
    maps: wgmma.Maps,
    parts: list[int],
    ticket_at: int,
    converted: TensorMap | None,
) -> Launch:
    """
    Args:
        drawing: loads the main kernel whose blocks draw their first tile as well, for streams of another priority than
            the default: such grids take multiprocessors from each other. None for staggered tiles: only those of one
            head wait for each other, so the blocks that are there end.
        maps: of query, key, value and grad_output; re-addressed when their tensor moved.
        parts: where lse_log2, delta, turns and sums begin in the workspace, in bytes.
        ticket_at: where the ticket is behind the first of the turns, in bytes.
        converted: of grad_query, if the main kernel writes it.
    """
    _, delta_at, turns_at, sums_at = parts
    prepare_buffer, start_prepare, pack_prepare = prepare.buffer, prepare.start, wgmma.PREPARE.pack_into
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
        cleared = 0 if converted is None else grad_query
        pack_prepare(prepare_buffer, 0, output, grad_output, lse, grad_lse, workspace, delta, turns, cleared)
        start_prepare(stream)
        wgmma.move(maps, query, key, value, grad_output)
        pack_main(
            main_buffer, _MAIN_AT, grad_key, grad_value, workspace, delta, sums, turns, turns + ticket_at
        )
        if converted is not None and converted.address != grad_query:
            converted.move(grad_query)
        if drawing is None or has_default_priority(stream):
            start_main(stream)
        else:
            try:
                other = drawing()
            except CaptureError:
                raise CaptureError(
                    "the kernel for streams of a priority of their own is not loaded yet, and cannot be while a CUDA "
                    "graph is captured; make the backward pass once on such a stream before capturing"
                ) from None
            ctypes.memmove(other.buffer, main_buffer, len(main_buffer))
            other.start(stream)
        if convert is not None:
            pack_convert(convert.buffer, 0, sums, workspace, grad_query)
            convert.start(stream)

    return launch
