"""The Hopper kernel (`kernels/cuda/attention_hopper_varlen.cu`): prompts and chunks of prompts, lengths on the device.

What is launched depends on no length: the grid has a block for each multiprocessor, and the blocks find their tiles.
"""

from __future__ import annotations

import functools
import math
import struct
import threading
from collections.abc import Callable
from typing import Any

import torch

from flashmoe_science.configs.attention import hopper_varlen as configs
from flashmoe_science.configs.attention.hopper import SWIZZLE_PANEL
from flashmoe_science.configs.attention.hopper_varlen import Extent, HopperFeatures, HopperVarlenConfiguration
from flashmoe_science.cuda import wgmma
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.launch import loaded
from flashmoe_science.cuda.repeat import raw_stream
from flashmoe_science.cuda.tensor_map import MAP_BYTES, TensorMap
from flashmoe_science.cuda.tickets import ticket_pool
from flashmoe_science.cuda.varlen.arguments import division
from flashmoe_science.cuda.varlen.key_maps import KeyMaps, KeyRows, misaligned
from flashmoe_science.cuda.varlen.kind import VarlenKernel
from flashmoe_science.errors import InputError, KernelDefectError
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.varlen.problem import Problem, Run, Sizes, Tensors

_OF_CALL = struct.Struct("8Q q 2i")  # addresses, the table's stride, batch, tokens
_OF_PLAN = struct.Struct("2q 7i 2I i 3f i 2I")
_CALL_AT = 3 * MAP_BYTES
_ADDRESS = struct.Struct("Q")
_TREE_AT = -(-(_CALL_AT + _OF_CALL.size + _OF_PLAN.size) // 8) * 8
"""Of a call too, and after all that kernels without trees read."""
ARGUMENT_BYTES = -(-(_TREE_AT + _ADDRESS.size) // 64) * 64
_ROWS = 64  # of a consumer warpgroup
_UNLIMITED = 1 << 29
_MOST_ROWS = 1 << 30
_ALIGNMENT = 16
_USUAL_ROWS = 16
"""Of a box: with fewer, or none, producers need more registers."""
_LARGEST_OF_ALL = 128
"""Head dimension at which every mask has registers enough for that."""
_BUILT_AHEAD = (64, 128)
"""Head dimensions."""
_REMEMBERED = 16
"""Extents whose tiles a problem's calls find without a look at the tables."""
_ANY = Extent(rows=1, slices=1, max_seqlen_k=1, multiprocessors=1)
"""For the tile that does not depend on what else is in the batch. `split_keys` asks for no more: a row's sums are over
blocks of its own sequence in a fixed order, and no row of another sequence has a say in them."""


def why_not(problem: Problem, device: Device, most_queries: int) -> str | None:
    """See `select.KernelModule`."""
    if problem.quantized is not None:
        return "it reads no cache of FP8"
    reason = wgmma.why_not_device(device)
    if reason is not None:
        return reason
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"it does not take {problem.dtype}"
    if problem.alibi:
        return "it has no ALiBi"
    compiled = configs.compiled_dimensions(problem.head_dim, problem.value_dim)
    if compiled is None:
        most = configs.DIMENSIONS[-1]
        return f"head_dim and value_dim are at most {most[0]} and {most[1]}"
    has = features(problem)
    is_plain = has.causal and not has.left_window and not has.tree
    if 0 < has.page_rows < _USUAL_ROWS and max(compiled) > _LARGEST_OF_ALL and not is_plain:
        # It spills, which of these depends on the compiler's version.
        limited = f"head dims are at most {_LARGEST_OF_ALL} over pages of {problem.page_size}"
        return f"{limited}, but under a causal mask without a window or a tree"
    return why_not_strides(problem, of_keys=has.page_rows != 1)


def why_not_strides(problem: Problem, *, of_keys: bool = True) -> str | None:
    """Why a kernel that reads queries, and keys and values, by TMA does not take a problem; None if it does."""
    reason = why_not_alignment(problem)
    if reason is None and any(stride == 0 for stride in _stepped_along(problem, of_keys)):
        reason = "its tensor maps cannot describe an expanded dimension"
    return reason


def why_not_alignment(problem: Problem) -> str | None:
    """Why a kernel that reads rows 16 bytes at a time does not take a problem; None if it does."""
    element = problem.dtype.itemsize
    strides = (problem.query_strides, problem.key_strides, problem.value_strides, problem.output_strides)
    if any(stride * element % _ALIGNMENT for each in strides for stride in each):
        return f"rows must begin at multiples of {_ALIGNMENT} bytes"
    if any(stride < 0 for each in strides for stride in each):
        return "strides must not be negative"
    return None


def _stepped_along(problem: Problem, of_keys: bool) -> list[int]:
    """The strides of dimensions that may have more than one element, of the query and perhaps of keys and values."""
    (query_token, query_head) = problem.query_strides
    stepped = [query_token]
    if problem.num_heads > 1:
        stepped.append(query_head)
    for page, token, head in (problem.key_strides, problem.value_strides) if of_keys else ():
        if problem.page_size:
            stepped.append(page)
        if problem.page_size != 1:
            stepped.append(token)
        if problem.num_kv_heads > 1:
            stepped.append(head)
    return stepped


def features(problem: Problem) -> HopperFeatures:
    return HopperFeatures(
        causal=problem.window_right >= 0 or problem.chunk > 0,
        left_window=problem.window_left >= 0 or problem.chunk > 0,
        softcap=problem.softcap > 0,
        page_rows=configs.page_rows(problem.page_size, problem.head_dim, problem.value_dim),
        chunk=problem.chunk > 0,
        tree=problem.tree,
        only=problem.only,
    )


def _tiles(problem: Problem, device: Device) -> Callable[[int, int], HopperVarlenConfiguration]:
    """The tile for calls of a problem, of (rows of a slice, max_seqlen_k)."""
    dimensions, has = (problem.head_dim, problem.value_dim), features(problem)
    usual = configs.configuration(*dimensions, has, _ANY)
    if problem.split_keys:
        return lambda rows, max_seqlen_k: usual
    slices, multiprocessors = problem.num_heads // heads_of_tile(problem), device.multiprocessors

    @functools.lru_cache(maxsize=_REMEMBERED)  # the layers of a step make the same call
    def tile_for(rows: int, max_seqlen_k: int) -> HopperVarlenConfiguration:
        return configs.configuration(*dimensions, has, Extent(rows, slices, max_seqlen_k, multiprocessors))

    return tile_for


def choose(problem: Problem, device: Device, sizes: Sizes, tokens: int) -> Choice:
    """See `select.KernelModule`."""
    tile = _tiles(problem, device)(tokens * heads_of_tile(problem), sizes.max_seqlen_k)
    reason = "TMA and wgmma kernel with the tile for these dimensions and this mask"
    return Choice(VarlenKernel.HOPPER, tile, reason)


def kernel(configuration: HopperVarlenConfiguration, dtype: torch.dtype) -> CudaKernel:
    has = configuration.features
    return CudaKernel(
        source="attention_hopper_varlen.cu",
        function="attention_hopper_varlen",
        architecture="sm_90a",
        macros={
            "HEAD_DIM": configuration.head_dim,
            "VALUE_DIM": configuration.value_dim,
            "CONSUMERS": configuration.consumers,
            "BLOCK_N": configuration.block_n,
            "K_STAGES": configuration.key_stages,
            "V_STAGES": configuration.value_stages,
            "Q_STAGES": configuration.query_stages,
            "PING_PONG": int(configuration.ping_pong),
            "SECTION_MIB": configuration.section_mib,
            "CAUSAL": int(has.causal),
            "LEFT_WINDOW": int(has.left_window),
            "SOFTCAP": int(has.softcap),
            "PAGED": int(has.page_rows > 0),
            "PAGE_ROWS": has.page_rows or configuration.block_n,
            **({"CHUNK": 1} if has.chunk else {}),
            **({"TREE": 1} if has.tree else {}),
            **({"ONLY": has.only} if has.only else {}),
            **({"NATIVE_CP_ASYNC": 1} if has.page_rows == 1 else {}),
            "ELEMENT_BF16": int(dtype == torch.bfloat16),
            "MMA_K": 16,
        },
        threads_per_block=configuration.threads,
        dynamic_shared_bytes=configuration.shared_bytes,
    )


def kernels(architecture: str) -> list[CudaKernel]:
    """What is built ahead of time: bfloat16, causal, packed and in pages of 16. Others compile at their first call."""
    if not wgmma.built_for(architecture):
        return []
    return [
        kernel(configs.configuration(dim, dim, HopperFeatures(True, page_rows=rows), _ANY), torch.bfloat16)
        for dim in _BUILT_AHEAD
        for rows in (0, 16)
    ]


def heads_of_tile(problem: Problem) -> int:
    """How many query heads share a tile: those of a key head, where they divide the rows of a warpgroup."""
    group = problem.num_heads // problem.num_kv_heads
    return group if _ROWS % group == 0 else 1


def prepare(problem: Problem, device: Device, most_queries: int) -> Run:
    """See `flashmoe_science.varlen.problem.Backend`; the device is current. For problems that `why_not` is None for.

    Raises:
        InputError: a tensor does not begin at a multiple of 16 bytes, or there are more rows than the kernel counts;
            both in the run.
        BuildError, KernelDefectError, DeviceError: see `driver.load`.
    """
    usual = configs.configuration(problem.head_dim, problem.value_dim, features(problem), _ANY)
    own = _OfThread()
    own.launches[usual] = _Launch(problem, usual, device)
    pool = ticket_pool(device.index)
    heads = heads_of_tile(problem)
    tile_for = _tiles(problem, device)

    def run(tensors: Tensors, sizes: Sizes) -> None:
        rows = tensors.query.shape[0] * heads
        tile = tile_for(rows, sizes.max_seqlen_k)
        launch = own.launches.get(tile)
        if launch is None:
            try:
                launch = _Launch(problem, tile, device)
            except KernelDefectError:
                if tile == usual:
                    raise
                launch = _Launch(problem, usual, device)
            own.launches[tile] = launch
        tiles = check_rows(problem, usual, tensors, sizes)
        launch.describe(tensors)
        stream = raw_stream(device.index)
        write_call(launch.launcher.buffer, tensors, sizes, pool.take(stream))
        launch.launcher.config.grid[0] = min(tiles, device.multiprocessors)
        launch.launcher.start(stream)

    return run


def check_rows(problem: Problem, tile: HopperVarlenConfiguration, tensors: Tensors, sizes: Sizes) -> int:
    """How many tiles a call has at most. Raises InputError where they, or its rows, are more than a launch counts."""
    heads = heads_of_tile(problem)
    rows = tensors.query.shape[0] * heads
    tiles = (rows // tile.block_m + sizes.batch + 1) * (problem.num_heads // heads)
    if rows >= _MOST_ROWS or tiles >= _MOST_ROWS:
        raise InputError(
            f"{tensors.query.shape[0]} query rows are more than a launch can count; split the batch"
        )
    return tiles


class _OfThread(threading.local):
    """Launchers have a buffer that is read during the launch, so each thread has its own."""

    def __init__(self) -> None:
        self.launches: dict[HopperVarlenConfiguration, _Launch] = {}


class _Launch:
    """A kernel that is loaded, and the tensors that its maps describe now."""

    def __init__(self, problem: Problem, tile: HopperVarlenConfiguration, device: Device) -> None:
        compiled = kernel(tile, problem.dtype)
        self.launcher = loaded(compiled, device, (1, 1, 1), ARGUMENT_BYTES)
        write_plan(self.launcher.buffer, problem, tile)
        self._maps = TensorMaps(self.launcher.buffer, problem, tile)

    def describe(self, tensors: Tensors) -> None:
        self._maps.describe(tensors)


class TensorMaps:
    """Of query, key and value, in a launch's buffer: made anew where a size changed, moved where an address did."""

    def __init__(self, buffer: Any, problem: Problem, tile: HopperVarlenConfiguration) -> None:
        self._buffer = buffer
        self._problem = problem
        self._tokens = -1
        self._query: TensorMap | None = None
        rows = tile.features.page_rows
        self._keys: KeyMaps | KeyRows = (
            KeyRows(buffer, MAP_BYTES, problem)
            if rows == 1
            else KeyMaps(buffer, MAP_BYTES, problem, rows or tile.block_n)
        )

    def describe(self, tensors: Tensors) -> None:
        """Raises InputError for a tensor that TMA cannot address."""
        query, tokens, address = self._query, tensors.query.shape[0], tensors.query.data_ptr()
        if tokens == 0:  # no row of it is read, but a map describes something
            tokens, address = 1, tensors.output.data_ptr()
        if query is None or self._tokens != tokens:
            query, self._tokens = self._make(tokens), tokens
            self._query = query
        if query.address != address:
            if address % _ALIGNMENT:
                raise InputError(misaligned("query"))
            query.move(address)
        self._keys.describe(tensors)

    def _make(self, tokens: int) -> TensorMap:
        problem = self._problem
        heads = heads_of_tile(problem)
        token, head = problem.query_strides
        return TensorMap(
            self._buffer,
            0,
            problem.dtype,
            (problem.head_dim, heads, tokens, problem.num_heads // heads),
            (head if heads > 1 else 0, token, heads * head if problem.num_heads > heads else 0),
            (SWIZZLE_PANEL, heads, _ROWS // heads),
        )


def write_plan(buffer: Any, problem: Problem, tile: HopperVarlenConfiguration) -> None:
    """The fields of the kernel's `Parameters` that are the same in all calls of a problem."""
    heads = heads_of_tile(problem)
    slices = problem.num_heads // heads
    left = _UNLIMITED if problem.window_left < 0 else min(problem.window_left, _UNLIMITED)
    right = _UNLIMITED if problem.window_right < 0 else min(problem.window_right, _UNLIMITED)
    reach = problem.chunk - 1 if problem.chunk else _UNLIMITED
    scale = problem.softmax_scale * math.log2(math.e)
    output_row, output_head = problem.output_strides
    _OF_PLAN.pack_into(
        buffer,
        _CALL_AT + _OF_CALL.size,
        output_row,
        output_head,
        slices,
        heads.bit_length() - 1,
        slices // problem.num_kv_heads,
        left,
        right,
        # Keys that the rows of a tile see lie in so many blocks, wherever they begin.
        (min(left, reach) + tile.block_m // heads + min(right, reach)) // tile.block_n + 2,
        problem.value_dim,
        *division(problem.page_size or 1),
        problem.page_size,
        scale,
        problem.softcap * math.log2(math.e),
        2 * scale / problem.softcap if problem.softcap else 0.0,
        problem.chunk,
        *division(problem.chunk or 1),
    )


def write_call(buffer: Any, tensors: Tensors, sizes: Sizes, ticket: int) -> None:
    """The other fields, but for the tensor maps. Raises InputError for an output that is not aligned."""
    output = tensors.output.data_ptr()
    if output % _ALIGNMENT:
        raise InputError(misaligned("out"))
    table = tensors.block_table
    _OF_CALL.pack_into(
        buffer,
        _CALL_AT,
        output,
        0 if tensors.lse is None else tensors.lse.data_ptr(),
        ticket,
        *(
            0 if tensor is None else tensor.data_ptr()
            for tensor in (
                tensors.cu_seqlens_q,
                tensors.cu_seqlens_k,
                tensors.seqused_k,
                table,
                tensors.sinks,
            )
        ),
        0 if table is None else table.stride(0),
        sizes.batch,
        tensors.query.shape[0],
    )
    if tensors.tree_mask is not None:
        _ADDRESS.pack_into(buffer, _TREE_AT, tensors.tree_mask.data_ptr())
