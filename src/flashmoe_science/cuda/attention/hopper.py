"""The Hopper attention kernel (`kernels/cuda/attention_hopper.cu`): configurations, tensor maps and launches."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

from flashmoe_science.configs.attention import hopper as configs
from flashmoe_science.configs.attention.hopper import HopperConfiguration
from flashmoe_science.cuda import wgmma
from flashmoe_science.cuda.attention.problem import KernelKind, Problem, Strides
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.launch import Launch, Launcher, LaunchPlan, loaded
from flashmoe_science.cuda.tensor_map import MAP_BYTES, TensorMap
from flashmoe_science.cuda.tickets import TicketPool, ticket_pool
from flashmoe_science.errors import InputError
from flashmoe_science.jit.nvrtc import CudaKernel

_POINTERS = struct.Struct("3Q")  # output, lse, ticket
_REST = struct.Struct("f 9i 3q")
_POINTERS_AT = 3 * MAP_BYTES
_ARGUMENT_BYTES = -(-(_POINTERS_AT + _POINTERS.size + _REST.size) // 64) * 64
_FEWEST_ROWS = 64
_MOST_TILES = 1 << 30


def choose(problem: Problem, device: Device) -> Choice | None:
    """The tile for the head dim, mask and length, where TMA can read the tensors and the compiler is up to it."""
    if why_not(problem, device) is not None:
        return None
    tile = configs.configuration(
        problem.head_dim,
        problem.causal,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.batch * problem.num_heads,
        device.multiprocessors,
    )
    return Choice(KernelKind.HOPPER, tile, "TMA and wgmma kernel with the tile for this head dim and mask")


def why_not(problem: Problem, device: Device) -> str | None:
    reason = wgmma.why_not_device(device)
    if reason is not None:
        return reason
    if problem.softmax_scale <= 0:
        return f"softmax_scale is {problem.softmax_scale:g}, and it needs a positive one"
    if problem.seqlen_q < _FEWEST_ROWS:
        return f"{problem.seqlen_q} query rows do not fill a tile of {_FEWEST_ROWS}"
    if problem.seqlen_k == 0:
        return "there are no keys"
    if not _all_mappable(problem):
        return "its tensor maps cannot describe an expanded dimension"
    return None


def _all_mappable(problem: Problem) -> bool:
    keys = problem.batch, problem.num_kv_heads, problem.seqlen_k
    return (
        _mappable(problem.query_strides, (problem.batch, problem.num_heads, problem.seqlen_q))
        and _mappable(problem.key_strides, keys)
        and _mappable(problem.value_strides, keys)
    )


def _mappable(strides: Strides, sizes: tuple[int, int, int]) -> bool:
    """A tensor map cannot repeat elements, as an expanded dimension does."""
    return all(stride > 0 or size == 1 for stride, size in zip(strides, sizes, strict=True))


def kernels(architecture: str) -> list[CudaKernel]:
    if not wgmma.built_for(architecture):
        return []
    return [
        kernel(tile, dtype)
        for tile in configs.all_configurations()
        for dtype in (torch.bfloat16, torch.float16)
    ]


def kernel(tile: HopperConfiguration, dtype: torch.dtype) -> CudaKernel:
    return CudaKernel(
        source="attention_hopper.cu",
        function="attention_hopper",
        architecture="sm_90a",
        macros={
            "HEAD_DIM": tile.head_dim,
            "CONSUMERS": tile.consumers,
            "BLOCK_N": tile.block_n,
            "K_STAGES": tile.key_stages,
            "V_STAGES": tile.value_stages,
            "Q_STAGES": tile.query_stages,
            "PING_PONG": int(tile.ping_pong),
            "CAUSAL": int(tile.causal),
            "ELEMENT_BF16": int(dtype == torch.bfloat16),
            "MMA_K": 16,
            **tile.ablation.macros,
        },
        threads_per_block=tile.threads,
        dynamic_shared_bytes=tile.shared_bytes,
    )


def check(problem: Problem, configuration: Any) -> None:
    if not isinstance(configuration, HopperConfiguration):
        raise InputError(f"the Hopper kernel takes a HopperConfiguration, not {configuration!r}")
    if problem.head_dim > configuration.head_dim:
        raise InputError(
            f"head_dim is {problem.head_dim}; expected at most the {configuration.head_dim} of {configuration}"
        )
    if problem.causal != configuration.causal:
        raise InputError(
            f"causal is {problem.causal}; expected the {configuration.causal} of {configuration}: choose again"
        )
    if problem.seqlen_k == 0 or problem.softmax_scale <= 0:
        raise InputError(
            f"the Hopper kernel needs keys and a positive softmax_scale, got {problem.seqlen_k} keys and "
            f"{problem.softmax_scale}; choose another kernel"
        )
    if not _all_mappable(problem):
        raise InputError("the Hopper kernel cannot read an expanded dimension; pass .contiguous() tensors")


def _launch(
    launcher: Launcher, query_map: TensorMap, key_map: TensorMap, value_map: TensorMap, tickets: TicketPool
) -> Launch:
    """A tensor map is re-addressed when its tensor moved."""
    start, buffer, pack, take = launcher.start, launcher.buffer, _POINTERS.pack_into, tickets.take

    def launch(query: int, key: int, value: int, output: int, lse: int, stream: int) -> None:
        if query_map.address != query:
            query_map.move(query)
        if key_map.address != key:
            key_map.move(key)
        if value_map.address != value:
            value_map.move(value)
        pack(buffer, _POINTERS_AT, output, lse, take(stream))
        start(stream)

    return launch


def plan(problem: Problem, configuration: Any, device: Device, *, allow_defects: bool = False) -> LaunchPlan:
    check(problem, configuration)
    tile: HopperConfiguration = configuration
    compiled = kernel(tile, problem.dtype)
    heads = problem.batch * problem.num_heads
    row_blocks = -(-problem.seqlen_q // tile.block_m)
    tiles = heads * row_blocks
    if tiles > _MOST_TILES:
        raise InputError(f"{tiles} tiles of query rows are more than the kernel counts; split the batch")
    blocks = min(tiles, device.multiprocessors * tile.blocks_per_multiprocessor)
    launcher = loaded(compiled, device, (blocks, 1, 1), _ARGUMENT_BYTES, allow_defects=allow_defects)
    _REST.pack_into(
        launcher.buffer,
        _POINTERS_AT + _POINTERS.size,
        problem.softmax_scale * math.log2(math.e),
        problem.seqlen_q,
        problem.seqlen_k,
        problem.num_heads,
        problem.num_heads // problem.num_kv_heads,
        row_blocks,
        heads,
        _heads_per_section(problem),
        tiles,
        problem.head_dim,
        *problem.output_strides,
    )

    def tensor_map(index: int, heads: int, rows: int, strides: Strides, box_rows: int) -> TensorMap:
        return TensorMap(
            launcher.buffer,
            index * MAP_BYTES,
            problem.dtype,
            (problem.head_dim, rows, heads, problem.batch),
            (strides[2], strides[1], strides[0]),
            (configs.SWIZZLE_PANEL, box_rows),
        )

    keys = problem.num_kv_heads, problem.seqlen_k
    launch = _launch(
        launcher,
        tensor_map(0, problem.num_heads, problem.seqlen_q, problem.query_strides, 64),
        tensor_map(1, *keys, problem.key_strides, tile.block_n),
        tensor_map(2, *keys, problem.value_strides, tile.block_n),
        ticket_pool(device.index),
    )
    return LaunchPlan(launch)


def _heads_per_section(problem: Problem) -> int:
    """How many query heads are worked on side by side; those of one key head always are."""
    group = problem.num_heads // problem.num_kv_heads
    if not problem.causal:
        return group
    kv_head_bytes = 2 * problem.seqlen_k * problem.head_dim * problem.dtype.itemsize
    kv_heads = max(1, configs.section_bytes(problem.head_dim, kv_head_bytes) // kv_head_bytes)
    return min(kv_heads * group, problem.batch * problem.num_heads)
