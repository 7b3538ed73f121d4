"""The general kernel (`kernels/cuda/attention_varlen.cu`): every problem up to head dim 256, from sm_80 on."""

from __future__ import annotations

import threading

import torch

from flashmoe_science.configs.attention.varlen import (
    ARCHITECTURES,
    MAX_HEAD_DIM,
    Features,
    Tiles,
    VarlenConfiguration,
    tiles,
)
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.launch import Launcher, loaded, type_macros
from flashmoe_science.cuda.repeat import raw_stream
from flashmoe_science.cuda.varlen.arguments import (
    ARGUMENT_BYTES,
    MOST_ROWS,
    PER_CALL,
    TREE_MASK,
    TREE_MASK_AT,
    PlanArguments,
)
from flashmoe_science.cuda.varlen.kind import VarlenKernel, bucket
from flashmoe_science.errors import InputError, KernelDefectError
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.varlen.problem import Problem, Run, Sizes, Tensors

_DTYPES = (torch.float16, torch.bfloat16)
_MOST_BLOCKS = 1 << 31
_L2_SHARE = 0.5
"""Part of the L2 cache that the keys and values of one section of heads may fill."""
_BUILT_AHEAD = (64, 128)
"""Head dimensions."""


def why_not(problem: Problem, device: Device, most_queries: int) -> str | None:
    """See `select.KernelModule`."""
    if problem.quantized is not None:
        return "it reads no cache of FP8"
    return why_not_dimensions(problem.dtype, problem.head_dim, problem.value_dim, device)


def why_not_dimensions(dtype: torch.dtype, head_dim: int, value_dim: int, device: Device) -> str | None:
    """The same of all that it depends on."""
    if dtype not in _DTYPES:
        return f"it takes float16 and bfloat16, and query is {dtype}: use .to()"
    if device.architecture not in ARCHITECTURES:
        return f"it needs sm_80 or later, and the GPU is {device.architecture}"
    for name, dimension in (("head_dim", head_dim), ("value_dim", value_dim)):
        if dimension > MAX_HEAD_DIM:
            return f"{name} is {dimension}, and it takes at most {MAX_HEAD_DIM}"
    return None


def features(problem: Problem) -> Features:
    return Features(
        paged=problem.page_size > 0,
        same_strides=problem.page_size == 0 or problem.key_strides == problem.value_strides,
        packed_heads=problem.num_heads > problem.num_kv_heads,
        left_window=problem.window_left >= 0 or problem.chunk > 0,
        softcap=problem.softcap > 0,
        alibi=problem.alibi,
        chunk=problem.chunk > 0,
        tree=problem.tree,
        only=problem.only,
    )


def kernel(configuration: VarlenConfiguration, dtype: torch.dtype, architecture: str) -> CudaKernel:
    return CudaKernel(
        source="attention_varlen.cu",
        function="attention_varlen",
        architecture=architecture,
        macros={
            "HEAD_DIM": configuration.head_dim,
            "VALUE_DIM": configuration.value_dim,
            "BLOCK_M": configuration.block_m,
            "BLOCK_N": configuration.block_n,
            "WARPS": configuration.warps,
            "MIN_BLOCKS": 1,  # with 0 the compiler aims at one more block than fits, and spills for it
            "QUERY_STEPS": configuration.query_steps,
            **configuration.features.macros,
            **type_macros(dtype),
        },
        threads_per_block=configuration.threads,
        dynamic_shared_bytes=configuration.shared_bytes,
    )


def kernels(architecture: str) -> list[CudaKernel]:
    """What is built ahead of time: bfloat16, grouped heads, no options. All others are compiled at their first call."""
    if architecture not in ARCHITECTURES:
        return []
    built = []
    for head_dim in _BUILT_AHEAD:
        for paged in (False, True):
            both = tiles(architecture, head_dim, head_dim, Features(paged=paged, packed_heads=True))
            built += [kernel(tile, torch.bfloat16, architecture) for tile in (both.tall, both.short)]
    return list({one.label: one for one in built}.values())


def prepare(problem: Problem, device: Device, most_queries: int) -> Run:
    """See `flashmoe_science.varlen.problem.Backend`; the device is current.

    Raises:
        InputError: rows that do not start at multiples of 16 bytes.
    """
    _check_rows(problem)
    arguments = plan_arguments(problem)
    both = tiles(device.architecture, problem.head_dim, problem.value_dim, features(problem))
    per_token = rows_per_token(problem)
    only_short = _is_short(problem, both, most_queries)
    tall = launcher(both.short if only_short else both.tall, problem.dtype, device, arguments)
    short = (
        tall if only_short or problem.split_keys else launcher(both.short, problem.dtype, device, arguments)
    )
    tall_rows = both.short.block_m if only_short else both.tall.block_m
    short_rows = tall_rows if short is tall else both.short.block_m
    slices, multiprocessors = arguments.num_slices, device.multiprocessors
    in_section = section_keys(problem.head_dim, problem.value_dim, problem.dtype.itemsize, device)
    index, stream_of, pack = device.index, raw_stream, PER_CALL.pack_into
    lock = threading.Lock()

    def run(tensors: Tensors, sizes: Sizes) -> None:
        query, key, value, output, lse, starts, key_starts, table, counts, sinks, slopes = tensors[:11]
        addresses = query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr()
        if (addresses[0] | addresses[1] | addresses[2] | addresses[3]) & 15:
            raise InputError(_misaligned(tensors))
        tokens, batch = query.shape[0], sizes.batch
        rows = tokens * per_token
        chosen, block_m = tall, tall_rows
        if -(-rows // tall_rows) * slices < multiprocessors:
            chosen, block_m = short, short_rows
        num_tiles = tile_bound(rows, batch, block_m)
        if not countable(rows, num_tiles * slices):
            raise InputError(f"{tokens} query rows are more than a launch can count; split the batch")
        with lock:  # another thread may be making the same call, of which there is one buffer
            pack(
                chosen.buffer,
                0,
                *addresses,
                0 if lse is None else lse.data_ptr(),
                starts.data_ptr(),
                0 if key_starts is None else key_starts.data_ptr(),
                0 if counts is None else counts.data_ptr(),
                0 if table is None else table.data_ptr(),
                0 if sinks is None else sinks.data_ptr(),
                0 if slopes is None else slopes.data_ptr(),
                0 if table is None else table.stride(0),
                slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
                batch,
                tokens,
                num_tiles,
                min(slices, max(1, in_section // max(sizes.max_seqlen_k, 1))),
            )
            if tensors.tree_mask is not None:
                TREE_MASK.pack_into(chosen.buffer, TREE_MASK_AT, tensors.tree_mask.data_ptr())
            chosen.config.grid[0] = num_tiles * slices
            chosen.start(stream_of(index))

    return run


def choose(problem: Problem, device: Device, sizes: Sizes, tokens: int) -> Choice:
    """See `select.KernelModule`."""
    both = tiles(device.architecture, problem.head_dim, problem.value_dim, features(problem))
    if problem.split_keys:
        return Choice(VarlenKernel.PORTABLE, both.tall, "mma.sync kernel with one tile for all batches")
    tile = both.short
    if not _is_short(problem, both, bucket(sizes.max_seqlen_q)):
        tile = tile_of(both, tokens * rows_per_token(problem), num_slices(problem), device)
    rows = "many" if tile is both.tall else "few"
    return Choice(VarlenKernel.PORTABLE, tile, f"mma.sync kernel with the tile for {rows} rows")


def _is_short(problem: Problem, both: Tiles, most_queries: int) -> bool:
    """Whether no sequence of such calls fills more than the short tile. With `split_keys` a sequence's bits may not
    depend on how much else is in the batch: one tile for all.
    """
    return most_queries * rows_per_token(problem) <= both.short.block_m and not problem.split_keys


def tile_of(both: Tiles, rows: int, slices: int, device: Device) -> VarlenConfiguration:
    """The tall tile where it gives every multiprocessor a block, else the short one.

    Args:
        rows: of a slice.
        slices: key/value heads of all batches, or heads where each has its own.
    """
    return both.tall if -(-rows // both.tall.block_m) * slices >= device.multiprocessors else both.short


def num_slices(problem: Problem) -> int:
    """What a tile's rows are of: query heads, or, where several share one, key/value heads."""
    return problem.num_kv_heads if features(problem).packed_heads else problem.num_heads


def rows_per_token(problem: Problem) -> int:
    """Of a tile."""
    return problem.num_heads // num_slices(problem)


def tile_bound(rows: int, batch: int, block_m: int) -> int:
    """Numbers that tiles of all sequences can have: see `varlen/work_tile.cuh`."""
    return rows // block_m + batch + 1


def plan_arguments(problem: Problem) -> PlanArguments:
    element = problem.dtype.itemsize
    (query_token, query_head), (output_token, output_head) = problem.query_strides, problem.output_strides
    key_page, key_token, key_head = problem.key_strides
    value_page, value_token, value_head = problem.value_strides
    return PlanArguments(
        query=(0, query_head * element, query_token * element),
        key=(key_page * element, key_head * element, key_token * element),
        value=(value_page * element, value_head * element, value_token * element),
        output=(0, output_head * element, output_token * element),
        lse=(0, 1, problem.num_heads),
        num_slices=num_slices(problem),
        heads_per_kv_head=problem.num_heads // problem.num_kv_heads,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        window_left=problem.window_left,
        window_right=problem.window_right,
        softmax_scale=problem.softmax_scale,
        softcap=problem.softcap,
        page_size=problem.page_size or 1,
        chunk=problem.chunk,
    )


def launcher(
    configuration: VarlenConfiguration, dtype: torch.dtype, device: Device, arguments: PlanArguments
) -> Launcher:
    """Compiled (or taken as it was) and loaded. The grid is one block, and nothing of a call is packed yet."""
    compiled = kernel(configuration, dtype, device.architecture)
    try:
        ready = loaded(compiled, device, (1, 1, 1), ARGUMENT_BYTES)
    except KernelDefectError:  # there is no other kernel, and a slower one is better than none
        ready = loaded(compiled, device, (1, 1, 1), ARGUMENT_BYTES, allow_defects=True)
    arguments.pack_into(ready.buffer)
    return ready


def countable(rows: int, blocks: int) -> bool:
    """Whether the kernel and a grid can count so many."""
    return rows < MOST_ROWS and blocks < _MOST_BLOCKS


def section_keys(head_dim: int, value_dim: int, element_bytes: int, device: Device) -> int:
    """How many keys of one head, with their values, fit the part of the L2 cache that a section of heads may fill."""
    return int(device.l2_bytes * _L2_SHARE) // ((head_dim + value_dim) * element_bytes)


def _check_rows(problem: Problem) -> None:
    for name in ("query", "key", "value", "output"):
        strides = getattr(problem, f"{name}_strides")
        if any(stride * problem.dtype.itemsize % 16 for stride in strides):
            shown = "out" if name == "output" else name
            raise InputError(
                f"{shown} has strides {strides} before its last dimension, and rows must start at multiples of 16 "
                f"bytes; pass {shown}.contiguous()"
            )


def _misaligned(tensors: Tensors) -> str:
    for name in ("query", "key", "value", "output"):
        if getattr(tensors, name).data_ptr() % 16:
            shown = "out" if name == "output" else name
            return f"{shown} does not start at a multiple of 16 bytes (a view at an odd offset); pass {shown}.clone()"
    raise AssertionError("every tensor is aligned")
