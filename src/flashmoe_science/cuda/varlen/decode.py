"""The decode kernel (`kernels/cuda/attention_decode.cu`): few query rows of each sequence, lengths on the device.

What is launched depends on no length and no number of sequences: the grid has a block for each multiprocessor, and the
blocks find their shares of the keys themselves.
"""

from __future__ import annotations

import math
import struct
import threading
from typing import Any

import torch

from flashmoe_science.configs.attention import decode as configs
from flashmoe_science.configs.attention.decode import KEY_TILE, MOST_DIM, DecodeConfiguration, Pages
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.driver import load
from flashmoe_science.cuda.launch import Launcher
from flashmoe_science.cuda.repeat import cuda_allocator, raw_stream
from flashmoe_science.cuda.tickets import decode_arrival_pool
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import limits
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.varlen.problem import Problem, Run, Sizes, Tensors

MOST_QUERIES = 15
"""Query tokens of a sequence that this kernel is for, by `select.bucket`: 8, and what is in one bucket with them."""
_OF_CALL = struct.Struct("=13Q2q2i")  # addresses, strides of tables, tokens, batch
_OF_PLAN = struct.Struct("=4Q2QI4x2QI4x2iI4i3f")
ARGUMENT_BYTES = _OF_CALL.size + _OF_PLAN.size
_UNLIMITED = 1 << 30
_PARTIAL_BYTES = 4 * (4 * 32 + 2 * 4)
"""The kernel's `Partial`: four sums for each lane, two statistics for each of four rows."""
_ALIGNMENT = 16
_BUILT_AHEAD = (64, 128)
"""Head dimensions."""
_MOST_WORKSPACE = 1 << 30


def why_not(problem: Problem, device: Device, most_queries: int) -> str | None:
    """Why the kernel cannot or should not take calls of a problem, as the end of a sentence about it; None if it does.

    Args:
        most_queries: no sequence of a call has more; see `select.bucket`.
    """
    element = problem.dtype.itemsize
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"it does not take {problem.dtype}"
    if problem.dtype == torch.bfloat16 and not limits(device.architecture).bfloat16:
        return f"{device.architecture} has no bfloat16"
    if max(problem.head_dim, problem.value_dim) > MOST_DIM:
        return f"head_dim and value_dim are at most {MOST_DIM}"
    strides = (problem.query_strides, problem.key_strides, problem.value_strides, problem.output_strides)
    if any(stride * element % _ALIGNMENT for each in strides for stride in each):
        return f"rows must begin at multiples of {_ALIGNMENT} bytes"
    if any(stride < 0 for each in strides for stride in each):
        return "strides must not be negative"
    if any(each[1] * element >= 1 << 32 for each in (problem.key_strides, problem.value_strides)):
        return "rows of keys and values are too far apart"
    most = configs.most_rows(max(problem.head_dim, problem.value_dim), *_features(problem))
    fewest = (most_queries + 1) // 2 * (problem.num_heads // problem.num_kv_heads)
    if most_queries > MOST_QUERIES or fewest > most:
        return f"it is for few queries: up to {most} rows of heads that share keys"
    return None


def _features(problem: Problem) -> tuple[Pages, bool]:
    return Pages.of(problem.page_size), problem.softcap != 0 or problem.alibi


def configuration_for(problem: Problem, sizes: Sizes, device: Device) -> DecodeConfiguration:
    return configs.configuration(
        device.architecture,
        problem.head_dim,
        problem.value_dim,
        sizes.max_seqlen_q * (problem.num_heads // problem.num_kv_heads),
        *_features(problem),
    )


def kernel(configuration: DecodeConfiguration, dtype: torch.dtype, architecture: str) -> CudaKernel:
    return CudaKernel(
        source="attention_decode.cu",
        function="attention_decode",
        architecture=architecture,
        macros={
            "HEAD_DIM": configuration.head_dim,
            "VALUE_DIM": configuration.value_dim,
            "ROW_TILES": configuration.row_tiles,
            "WARPS": configuration.warps,
            "KEY_TILES": configuration.key_tiles,
            "LATE_VALUES": int(configuration.late_values),
            "PAGES": int(configuration.pages),
            "SCORE_CHANGES": int(configuration.score_changes),
            "DEPENDENT": int(configuration.dependent),
            "ELEMENT_BF16": int(dtype == torch.bfloat16),
            "MMA_K": configuration.mma_k,
            "NATIVE_CP_ASYNC": int(limits(architecture).cp_async),
            "NATIVE_REDUX": int(limits(architecture).cp_async),
        },
        threads_per_block=configuration.threads,
        dynamic_shared_bytes=configuration.shared_bytes,
    )


def kernels(architecture: str) -> list[CudaKernel]:
    """What is built ahead of time: one token, pages of 16 and more. Others are compiled at their first call."""
    dtype = torch.bfloat16 if limits(architecture).bfloat16 else torch.float16
    return [
        kernel(configs.configuration(architecture, dim, dim, 8, Pages.TILES, False), dtype, architecture)
        for dim in _BUILT_AHEAD
    ]


def prepare(problem: Problem, device: Device, most_queries: int) -> Run:
    """See `flashmoe_science.varlen.problem.Backend`; the device is current. For problems that `why_not` is None for.

    Raises:
        InputError: a tensor does not begin at a multiple of 16 bytes, or `workspace_bytes` does; both in the run.
        BuildError, DeviceError: see `driver.load`.
    """
    allocate = cuda_allocator()
    own = _OfThread()

    grid = device.multiprocessors

    def run(tensors: Tensors, sizes: Sizes) -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        rows = sizes.max_seqlen_q
        launcher = own.launchers.get(rows)
        if launcher is None:
            launcher = own.launchers[rows] = _launcher(problem, sizes, device, capturing)
        configuration, start, buffer = launcher
        pool = decode_arrival_pool(device.index)
        workspace = allocate((workspace_bytes(problem, sizes, configuration, grid),), (1,), torch.uint8)
        if not capturing:
            pool.reserve()
        stream = raw_stream(device.index)
        arrivals = pool.take(stream, arrival_counters(grid, configuration))
        write_call(buffer, tensors, sizes, workspace.data_ptr(), arrivals)
        start(stream)

    return run


class _OfThread(threading.local):
    """Launchers have a buffer that is read during the launch, so each thread has its own; by query tokens."""

    def __init__(self) -> None:
        self.launchers: dict[int, tuple[DecodeConfiguration, Any, Any]] = {}


def _launcher(
    problem: Problem, sizes: Sizes, device: Device, capturing: bool
) -> tuple[DecodeConfiguration, Any, Any]:
    configuration = configuration_for(problem, sizes, device)
    compiled = kernel(configuration, problem.dtype, device.architecture)
    function = load(compiled, device.index, capturing, allow_defects=True)
    launcher = Launcher(
        function, (device.multiprocessors, 1, 1), compiled, ARGUMENT_BYTES, dependent=configuration.dependent
    )
    write_plan(launcher.buffer, problem)
    return configuration, launcher.start, launcher.buffer


def arrival_counters(grid: int, configuration: DecodeConfiguration) -> int:
    """Of a launch: for each warp of a block that begins a set which others go on with."""
    return grid * configuration.warps


def workspace_bytes(problem: Problem, sizes: Sizes, configuration: DecodeConfiguration, grid: int) -> int:
    """What blocks leave each other: two results each. With `split_keys` one for each piece of each set of rows.

    Raises InputError where pieces are so many that these take more than a gigabyte.
    """
    slot = configuration.quads * _PARTIAL_BYTES
    if not problem.split_keys:
        return 2 * grid * slot
    rows = sizes.max_seqlen_q * (problem.num_heads // problem.num_kv_heads)
    sets = sizes.batch * problem.num_kv_heads * -(-rows // configuration.rows)
    pieces = sets * (-(-sizes.max_seqlen_k // problem.split_keys) + 1)
    if pieces * slot > _MOST_WORKSPACE:
        raise InputError(
            f"split_keys={problem.split_keys} cuts {sizes.batch} sequences of up to {sizes.max_seqlen_k} keys into so "
            f"many parts that their results take {pieces * slot >> 20} MiB; expected at most {_MOST_WORKSPACE >> 20}: "
            "give a larger split_keys, or closer bounds"
        )
    return pieces * slot


def write_plan(buffer: Any, problem: Problem) -> None:
    """The fields of the kernel's `Parameters` that are the same in all calls of a problem."""
    element = problem.dtype.itemsize
    group = problem.num_heads // problem.num_kv_heads
    log2_e = math.log2(math.e)
    query, output = (
        [element * stride for stride in each] for each in (problem.query_strides, problem.output_strides)
    )
    caches = []
    for page, token, head in (problem.key_strides, problem.value_strides):
        caches += [element * page, element * head, element * token]
    cap = problem.softcap
    _OF_PLAN.pack_into(
        buffer,
        _OF_CALL.size,
        *query,
        *output,
        *caches,
        problem.num_kv_heads,
        group,
        (1 << 32) // group + 1 if group > 1 else 0,
        problem.page_size,
        _UNLIMITED if problem.window_left < 0 else min(problem.window_left, _UNLIMITED),
        _UNLIMITED if problem.window_right < 0 else min(problem.window_right, _UNLIMITED),
        problem.split_keys // KEY_TILE,
        problem.softmax_scale * log2_e,
        cap * log2_e,
        2 * log2_e * problem.softmax_scale / cap if cap else 0.0,
    )


def write_call(buffer: Any, tensors: Tensors, sizes: Sizes, workspace: int, arrivals: int) -> None:
    """The other fields. Raises InputError for a tensor that does not begin at a multiple of 16 bytes."""
    query, key, value, output = tensors.query, tensors.key, tensors.value, tensors.output
    addresses = query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr()
    if (addresses[0] | addresses[1] | addresses[2] | addresses[3]) % _ALIGNMENT:
        raise InputError(
            f"query, key, value or out does not start at a multiple of {_ALIGNMENT} bytes (a view at an odd offset); "
            "pass a .clone()"
        )
    table, slopes = tensors.block_table, tensors.alibi_slopes
    _OF_CALL.pack_into(
        buffer,
        0,
        *addresses,
        *(
            0 if tensor is None else tensor.data_ptr()
            for tensor in (
                tensors.lse,
                tensors.cu_seqlens_q,
                tensors.cu_seqlens_k,
                tensors.seqused_k,
                table,
                tensors.sinks,
                slopes,
            )
        ),
        workspace,
        arrivals,
        0 if table is None else table.stride(0),
        slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        query.shape[0],
        sizes.batch,
    )
