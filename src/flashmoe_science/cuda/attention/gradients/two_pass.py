"""The two-pass Hopper kernels of attention backward, for large head dims: configurations, tensor maps and launches.

Three launches: `kernels/cuda/attention_backward_prepare.cu`, `attention_backward_two_pass_key_value.cu` and
`attention_backward_two_pass_query.cu`; a pass whose gradients are not needed is left out.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

from flashmoe_science.configs.attention import backward_two_pass as configs
from flashmoe_science.configs.attention.backward_two_pass import TwoPassBackward
from flashmoe_science.cuda.attention.gradients import wgmma
from flashmoe_science.cuda.attention.gradients.problem import BackwardProblem, GradientKind
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.launch import Launch, Launcher, LaunchPlan, loaded
from flashmoe_science.cuda.tensor_map import MAP_BYTES
from flashmoe_science.cuda.workspace import place
from flashmoe_science.errors import InputError
from flashmoe_science.jit.nvrtc import CudaKernel

_PASS = struct.Struct("5Q")  # grad_query, grad_key, grad_value, lse_log2, delta
_PASS_REST = struct.Struct("2f 8i 9q")
_PASS_AT = 4 * MAP_BYTES
_PASS_BYTES = -(-(_PASS_AT + _PASS.size + _PASS_REST.size) // 64) * 64
_PANEL = 64  # columns of a shared-memory panel with the 128-byte swizzle
_MOST_BLOCKS = 1 << 30
_FLOAT_BYTES = 4
_TICKET_BYTES = 4  # of the launch before, which sets one to zero


def choose(problem: BackwardProblem, device: Device) -> Choice | None:
    if why_not(problem, device) is not None:
        return None
    tile = configs.configuration(problem.head_dim, problem.causal)
    return Choice(GradientKind.TWO_PASS, tile, "TMA and wgmma kernels, a pass over keys and one over queries")


def why_not(problem: BackwardProblem, device: Device) -> str | None:
    return wgmma.why_not_device(device) or _refusal(problem)


def _refusal(problem: BackwardProblem) -> str | None:
    """Why it cannot do the problem on any GPU."""
    if configs.configuration(problem.head_dim, problem.causal) is None:
        return f"head_dim is {problem.head_dim}, and it takes {configs.LEAST_HEAD_DIM} to {configs.HEAD_DIMS[-1]}"
    if problem.needs.key != problem.needs.value:
        return "it makes the gradients of keys and values together, of which only one is needed"
    if not problem.is_plain:
        return "it takes no window and no cap"
    return wgmma.why_not_problem(problem)


def kernels(architecture: str) -> list[CudaKernel]:
    if not wgmma.built_for(architecture):
        return []
    return [
        kernel
        for dtype in (torch.bfloat16, torch.float16)
        for kernel in (
            prepare_kernel(dtype),
            *(
                make(tile, dtype)
                for tile in configs.all_configurations()
                for make in (key_value_kernel, query_kernel)
            ),
        )
    ]


def prepare_kernel(dtype: torch.dtype) -> CudaKernel:
    return wgmma.prepare_kernel(dtype, lanes=configs.LANES, block_m=configs.QUERY_ROWS, pieces=0)


def key_value_kernel(tile: TwoPassBackward, dtype: torch.dtype) -> CudaKernel:
    return _kernel("key_value", tile, dtype, tile.key_value_shared_bytes)


def query_kernel(tile: TwoPassBackward, dtype: torch.dtype) -> CudaKernel:
    return _kernel("query", tile, dtype, tile.query_shared_bytes)


def _kernel(part: str, tile: TwoPassBackward, dtype: torch.dtype, shared_bytes: int) -> CudaKernel:
    macros = {"HEAD_DIM": tile.head_dim, "CAUSAL": int(tile.causal), **tile.ablation.macros}
    return wgmma.kernel(f"attention_backward_two_pass_{part}", dtype, macros, tile.threads, shared_bytes)


def check(problem: BackwardProblem, configuration: Any) -> None:
    if not isinstance(configuration, TwoPassBackward):
        raise InputError(f"the two-pass backward kernels take a TwoPassBackward, not {configuration!r}")
    wgmma.check_fits(problem, configuration)
    refusal = _refusal(problem)
    if refusal is not None:
        raise InputError(f"the two-pass backward kernels cannot take this: {refusal}; choose another kernel")


def plan(
    problem: BackwardProblem, configuration: Any, device: Device, *, allow_defects: bool = False
) -> LaunchPlan:
    check(problem, configuration)
    tile: TwoPassBackward = configuration
    heads, kv_heads = problem.batch * problem.num_heads, problem.batch * problem.num_kv_heads
    query_blocks = -(-problem.seqlen_q // configs.QUERY_ROWS)
    key_blocks = -(-problem.seqlen_k // configs.ROWS)
    for blocks in (heads * query_blocks, kv_heads * key_blocks):
        if blocks > _MOST_BLOCKS:
            raise InputError(f"{blocks} blocks of rows are more than a grid holds; split the batch")

    prepare = wgmma.prepare_launcher(
        problem,
        device,
        lanes=configs.LANES,
        block_m=configs.QUERY_ROWS,
        pieces=0,
        allow_defects=allow_defects,
    )
    group = problem.num_heads // problem.num_kv_heads
    passes: list[tuple[Launcher, wgmma.Maps]] = []

    def add(kernel: CudaKernel, blocks: int, section: int) -> None:
        # The second pass reads nothing that the first wrote, which starts it once the statistics are there. Alone, it
        # starts once all that came before has ended.
        started = loaded(
            kernel,
            device,
            (blocks, 1, 1),
            _PASS_BYTES,
            dependent=problem.needs.key,
            allow_defects=allow_defects,
        )
        _pack(problem, started, query_blocks * configs.QUERY_ROWS, section)
        maps = wgmma.tensor_maps(
            problem, started, MAP_BYTES, columns=_PANEL, query_rows=configs.ROWS, key_rows=configs.ROWS
        )
        passes.append((started, maps))

    if problem.needs.key:
        section = configs.heads_per_section(group * problem.seqlen_q, tile, kv_heads)
        add(key_value_kernel(tile, problem.dtype), kv_heads * key_blocks, section)
    if problem.needs.query:
        section = configs.heads_per_section(problem.seqlen_k / group, tile, heads)
        add(query_kernel(tile, problem.dtype), heads * query_blocks, section)

    statistics = heads * query_blocks * configs.QUERY_ROWS * _FLOAT_BYTES
    *parts, workspace = place(statistics, statistics, _TICKET_BYTES)
    return LaunchPlan(_launch(prepare, passes, parts), workspace)


def _pack(problem: BackwardProblem, launcher: Launcher, statistic_rows: int, section: int) -> None:
    _PASS_REST.pack_into(
        launcher.buffer,
        _PASS_AT + _PASS.size,
        problem.softmax_scale,
        problem.softmax_scale * math.log2(math.e),
        problem.seqlen_q,
        problem.seqlen_k,
        problem.num_heads,
        problem.num_kv_heads,
        problem.batch,
        statistic_rows,
        problem.head_dim,
        section,
        *problem.grad_query_strides,
        *problem.grad_key_strides,
        *problem.grad_value_strides,
    )


def _launch(prepare: Launcher, passes: list[tuple[Launcher, wgmma.Maps]], parts: list[int]) -> Launch:
    """``parts``: where lse_log2, delta and the ticket begin in the workspace, in bytes."""
    _, delta_at, ticket_at = parts
    prepare_buffer, start_prepare, pack_prepare = prepare.buffer, prepare.start, wgmma.PREPARE.pack_into
    pack, move = _PASS.pack_into, wgmma.move

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
        delta = workspace + delta_at
        ticket = workspace + ticket_at
        pack_prepare(prepare_buffer, 0, output, grad_output, lse, grad_lse, workspace, delta, ticket, 0)
        start_prepare(stream)
        for launcher, maps in passes:
            move(maps, query, key, value, grad_output)
            pack(launcher.buffer, _PASS_AT, grad_query, grad_key, grad_value, workspace, delta)
            launcher.start(stream)

    return launch
