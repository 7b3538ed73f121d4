"""The portable kernels of attention backward: configurations and launches.

Two launches, `kernels/cuda/attention_backward_query.cu` and `attention_backward_key_value.cu`. Where the latter makes
the gradient of the query, too, or none is needed, `attention_backward_statistics.cu` takes the place of the first.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import struct
from typing import Any

import torch

from flashmoe_science.configs.attention import backward as configs
from flashmoe_science.configs.attention.backward import (
    KeyValueTile,
    PortableBackward,
    QueryTile,
    ScoreFeatures,
)
from flashmoe_science.cuda.attention.gradients.problem import BackwardProblem, GradientKind
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device, element_types, why_not_type
from flashmoe_science.cuda.launch import Launch, Launcher, LaunchPlan, loaded
from flashmoe_science.cuda.workspace import place
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import MAX_REGISTERS_PER_THREAD, occupancy
from flashmoe_science.jit.nvrtc import CudaKernel

POINTERS = struct.Struct("14Q")
"""Addresses of query, key, value, output, grad_output, lse, grad_lse, grad_query, grad_key, grad_value, lse_log2,
delta, query_sums and turns, the head of `BackwardParameters`. 0 for what there is not.
"""
_REST = struct.Struct("24q 12i 5f")
ARGUMENT_BYTES = -(-(POINTERS.size + _REST.size) // 8) * 8
_NO_MASK = 1 << 30
_WIDEST = 1 << 29  # side of a window: wider than any number of keys
_MOST_BLOCKS = 1 << 31
_FLOAT_BYTES = 4
_WORKSPACE_PARTS = 4
_TURN_ROWS = configs.STATISTICS_THREADS // 4  # that a counter of turns is there for
_TURN_STEPS = 2  # of a block of keys before the next one of its head may add to the same rows
_TURN_SHARE = 0.25  # of a block's steps that may pass by waiting: two passes make 7 products instead of 5
_L2_SHARE = 0.5  # part of the L2 cache that what one section of heads reads again and again may fill
_NO_SCALE = 1e-30  # stands for a softmax scale of zero: no score counts, and none times it is not a number


def choose(problem: BackwardProblem, device: Device) -> Choice | None:
    """Every problem but bfloat16 on sm_75, whose tensor cores do not take it."""
    if why_not(problem, device) is not None:
        return None
    configuration = configs.configuration(device.architecture, problem.head_dim)
    if not problem.is_plain:
        return Choice(
            GradientKind.PORTABLE,
            configuration.with_features(features(problem)),
            "mma.sync kernels, which take every window and cap",
        )
    if problem.seqlen_k < configuration.least_keys or not _keeps_turns_moving(problem, configuration, device):
        configuration = dataclasses.replace(configuration, single=None)
        return Choice(
            GradientKind.PORTABLE, configuration, "mma.sync kernels, a pass over queries and one over keys"
        )
    return Choice(GradientKind.PORTABLE, configuration, "mma.sync kernel, one pass over keys")


def features(problem: BackwardProblem) -> ScoreFeatures:
    return ScoreFeatures(window=problem.window_left >= 0, softcap=problem.softcap > 0)


def _keeps_turns_moving(problem: BackwardProblem, configuration: PortableBackward, device: Device) -> bool:
    """Whether one pass fills the GPU, and its blocks seldom wait. Those of one head add to its queries' gradients in
    turn: of those that run side by side each begins `_TURN_STEPS` after the one before it, which all steps of a
    multiprocessor make up for.
    """
    tile = configuration.single
    if tile is None:
        return False
    heads, slots = problem.batch * problem.num_kv_heads, _slots(tile, device)
    blocks = -(-problem.seqlen_k // tile.block_n)
    side_by_side = min(blocks, -(-slots // max(heads, 1)))
    rows = problem.seqlen_q * problem.num_heads // problem.num_kv_heads / (2 if problem.causal else 1)
    steps = rows / tile.block_m * heads * blocks / slots
    return heads * blocks >= slots and _TURN_STEPS * (side_by_side - 1) <= _TURN_SHARE * steps


def _slots(tile: KeyValueTile, device: Device) -> int:
    """Blocks that a GPU runs at a time."""
    most = occupancy(device.architecture, tile.threads, MAX_REGISTERS_PER_THREAD, tile.shared_bytes)
    return device.multiprocessors * most.blocks_per_sm


def why_not(problem: BackwardProblem, device: Device) -> str | None:
    return why_not_type(problem.dtype, device)


def kernels(architecture: str) -> list[CudaKernel]:
    """What is built ahead of time: kernels with a window or a cap are compiled at their first call."""
    dtypes = element_types(architecture)
    all_kernels = [statistics_kernel(dtype, architecture) for dtype in dtypes]
    for configuration in configs.all_configurations(architecture):
        for dtype in dtypes:
            all_kernels.append(query_kernel(configuration.query, dtype, architecture))
            for tile in configuration.key_tiles:
                all_kernels.append(key_value_kernel(tile, dtype, architecture))
    return list({kernel.label: kernel for kernel in all_kernels}.values())


def check(problem: BackwardProblem, configuration: Any) -> None:
    if not isinstance(configuration, PortableBackward):
        raise InputError(f"the portable backward kernels take a PortableBackward, not {configuration!r}")
    most = configuration.query.head_dim
    if problem.head_dim > most:
        raise InputError(
            f"head_dim is {problem.head_dim}; expected at most the {most} of the tiles "
            f"({configuration.label}): choose again"
        )
    compiled = {configuration.query.features, *(tile.features for tile in configuration.key_tiles)}
    if compiled != {features(problem)}:
        raise InputError(f"{configuration} was chosen for another problem: choose again")


def plan(
    problem: BackwardProblem, configuration: Any, device: Device, *, allow_defects: bool = False
) -> LaunchPlan:
    check(problem, configuration)
    architecture, dtype = device.architecture, problem.dtype
    steps: list[tuple[CudaKernel, tuple[float, ...]]] = []
    of_keys = problem.needs.key or problem.needs.value
    single = one_pass(problem, configuration)
    if problem.needs.query and single is None:
        fields = query_fields(problem, configuration.query, device)
        steps.append((query_kernel(configuration.query, dtype, architecture), fields))
    elif of_keys:
        steps.append((statistics_kernel(dtype, architecture), statistics_fields(problem)))
    if of_keys:
        tile = single or configuration.key_value
        fields = key_value_fields(problem, tile, device)
        steps.append((key_value_kernel(tile, dtype, architecture), fields))
    launchers = [
        _launcher(kernel, fields, device, allow_defects) for kernel, fields in steps if blocks(fields) > 0
    ]
    return LaunchPlan(*_in_order(launchers, workspace_bytes(problem, single) if of_keys else ()))


def one_pass(problem: BackwardProblem, configuration: PortableBackward) -> KeyValueTile | None:
    """The tile of the pass that makes all gradients asked for, if there is one for them."""
    needs = problem.needs
    if needs.query and (needs.key or needs.value) and problem.seqlen_k > 0:
        return configuration.single
    return None


def workspace_bytes(problem: BackwardProblem, single: KeyValueTile | None) -> tuple[int, ...]:
    """Of the parts of the workspace: the last pointers of `BackwardParameters`, in order."""
    heads = problem.batch * problem.num_heads
    statistics = heads * problem.statistics_rows * _FLOAT_BYTES
    if single is None:
        return statistics, statistics
    rows = -(-problem.seqlen_q // single.block_m) * single.block_m
    turns = heads * -(-problem.statistics_rows // _TURN_ROWS)
    return statistics, statistics, heads * rows * single.head_dim * _FLOAT_BYTES, turns * _FLOAT_BYTES


def _launcher(kernel: CudaKernel, fields: tuple[float, ...], device: Device, allow_defects: bool) -> Launcher:
    if blocks(fields) >= _MOST_BLOCKS:
        raise InputError(f"{blocks(fields)} blocks are more than a grid holds; split the batch")
    launcher = loaded(kernel, device, (blocks(fields), 1, 1), ARGUMENT_BYTES, allow_defects=allow_defects)
    pack_fields(launcher.buffer, fields)
    return launcher


def _in_order(launchers: list[Launcher], parts: tuple[int, ...]) -> tuple[Launch, int]:
    """Launches these one after the other: (query, key, value, output, grad_output, lse, grad_lse, grad_query, grad_key,
    grad_value, workspace, stream), and no workspace if it has no bytes. With it the bytes of the workspace.

    Args:
        parts: the bytes of the workspace's.
    """
    pack = POINTERS.pack_into
    *offsets, workspace = place(*parts)
    absent = (0,) * (_WORKSPACE_PARTS - (len(parts) if workspace else 0))

    def launch(*given: int) -> None:
        *addresses, stream = given
        if workspace:
            begin = addresses.pop()
            addresses += [begin + offset for offset in offsets]
        for buffer, start in starts:
            pack(buffer, 0, *addresses, *absent)
            start(stream)

    starts = [(launcher.buffer, launcher.start) for launcher in launchers]
    return launch, workspace


def query_kernel(tile: QueryTile, dtype: torch.dtype, architecture: str) -> CudaKernel:
    return _kernel("attention_backward_query", tile, dtype, architecture)


def key_value_kernel(tile: KeyValueTile, dtype: torch.dtype, architecture: str) -> CudaKernel:
    return _kernel("attention_backward_key_value", tile, dtype, architecture)


def statistics_kernel(dtype: torch.dtype, architecture: str) -> CudaKernel:
    return CudaKernel(
        source="attention_backward_statistics.cu",
        function="attention_backward_statistics",
        architecture=architecture,
        macros={
            "THREADS": configs.STATISTICS_THREADS,
            "ELEMENT_BF16": int(dtype == torch.bfloat16),
            "MMA_K": 8 if architecture == "sm_75" else 16,
        },
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
    group = problem.num_heads // problem.num_kv_heads
    section = int(device.l2_bytes * _L2_SHARE / kv_head_bytes) * group if problem.causal else 1
    return _fields(problem, problem.seqlen_q, tile.block_m, heads, section, last_first=problem.causal)


def key_value_fields(problem: BackwardProblem, tile: KeyValueTile, device: Device) -> tuple[float, ...]:
    """What follows the addresses in the argument of the pass over keys."""
    heads = problem.batch * problem.num_kv_heads
    group = problem.num_heads // problem.num_kv_heads
    section = 1
    if tile.queries:
        # As many heads as blocks run at a time, so that few of one head do: each begins later than the one before it.
        section = _slots(tile, device)
    elif problem.causal:
        group_bytes = 2 * group * max(problem.seqlen_q, 1) * problem.head_dim * problem.dtype.itemsize
        section = int(device.l2_bytes * _L2_SHARE / group_bytes)
    # The first keys are seen by the most rows.
    return _fields(problem, problem.seqlen_k, tile.block_n, heads, section, last_first=False)


def statistics_fields(problem: BackwardProblem) -> tuple[float, ...]:
    """What follows the addresses in the argument of the kernel that only makes statistics."""
    heads = problem.batch * problem.num_heads
    return _fields(
        problem, problem.statistics_rows, configs.STATISTICS_THREADS // 4, heads, 1, last_first=False
    )


def blocks(fields: tuple[float, ...]) -> int:
    """Of the grid that these fields are for."""
    blocks_per_slice, slices = fields[31:33]
    return int(blocks_per_slice * slices)


def pack_fields(buffer: ctypes.Array[ctypes.c_char], fields: tuple[float, ...]) -> None:
    _REST.pack_into(buffer, POINTERS.size, *fields)


def _fields(
    problem: BackwardProblem,
    length: int,
    block: int,
    heads: int,
    section: int,
    *,
    last_first: bool,
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
    offset = problem.seqlen_k - problem.seqlen_q
    left, right = (
        min(problem.window_left, _WIDEST),
        0 if problem.causal else min(problem.window_right, _WIDEST),
    )
    softcap_log2 = problem.softcap * math.log2(math.e)
    return (
        *(stride * element for tensor in strides for stride in tensor),
        problem.num_heads,
        problem.num_heads // problem.num_kv_heads,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.head_dim,
        _NO_MASK if right < 0 else offset + right,
        problem.statistics_rows,
        -(-length // block),
        heads,
        min(max(1, section), heads),
        int(last_first),
        -_NO_MASK if left < 0 else offset - left,
        problem.softmax_scale * math.log2(math.e) or _NO_SCALE,
        problem.softmax_scale,
        softcap_log2,
        1 / softcap_log2 if softcap_log2 else 0.0,
        2 * problem.softmax_scale * math.log2(math.e) / problem.softcap if softcap_log2 else 0.0,
    )
