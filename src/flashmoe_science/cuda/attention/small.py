"""The small-shape attention kernel (`kernels/cuda/attention_small.cu`): configurations and launches."""

from __future__ import annotations

import math
import struct
import threading
from typing import Any, NamedTuple

import torch

from flashmoe_science.configs.attention import small as configs
from flashmoe_science.configs.attention.small import MOST_ARRIVALS, RowSlices, SmallConfiguration
from flashmoe_science.configs.attention.small_keys import share_keys
from flashmoe_science.configs.attention.small_passes import Work, measured, microseconds
from flashmoe_science.cuda.attention.problem import KernelKind, Problem
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device, element_types, why_not_type
from flashmoe_science.cuda.kept import kept
from flashmoe_science.cuda.launch import ADDRESSES, Launch, Launcher, LaunchPlan, loaded
from flashmoe_science.cuda.repeat import cuda_allocator
from flashmoe_science.cuda.tickets import TicketPool, arrival_pool, is_capturing
from flashmoe_science.errors import InputError
from flashmoe_science.jit.nvrtc import CudaKernel

_TENSOR = struct.Struct("=2QI4x")
_REST = struct.Struct("=4iIfi4x")
_TENSORS_AT = ADDRESSES.size
_REST_AT = _TENSORS_AT + 4 * _TENSOR.size
_ARGUMENT_BYTES = _REST_AT + _REST.size
_SPLIT_ADDRESSES = struct.Struct("=2Q")  # partial results, arrivals
_SPLIT_COUNTS = struct.Struct("=2i")
_SPLIT_AT = _ARGUMENT_BYTES
_SPLIT_BYTES = _SPLIT_ADDRESSES.size + _SPLIT_COUNTS.size
_PARTIAL_FLOATS = 4 * 32 + 2 * 4
"""The kernel's `Partial`: four sums for each lane, two statistics for each of four rows."""
_MOST_KEPT_FLOATS = 4 << 20
"""Of the workspace that a stream keeps; a launch with more has its own."""
_NO_MASK = 1 << 30
_MOST_GRID_YZ = 65535
_MOST_ROW_BLOCKS = 2
_MOST_BYTES = 9 << 20
_MOST_BYTES_PER_KEY = 40 << 10
_TALL_US = 4.2
_TALL_US_PER_KEY = {64: 7.7 / 1024, 96: 8.3 / 1024, 128: 9.5 / 1024, 192: 13 / 1024, 256: 18 / 1024}
"""Time of a tile of the kernels with tall tiles, by the largest head dim; those of 96 and 192 are in between."""
_TALL_KEYS = 128
_RAGGED_US = 0.7
"""What a last tile of fewer keys costs, beyond that it is computed whole."""
_SOONER = 0.95
"""Part of that which this kernel may take by estimate: in several turns under a causal mask it takes a little more."""


def choose(problem: Problem, device: Device) -> Choice | None:
    """The configuration if the call is all latency, or decode.

    The kernel has few rows per block and many blocks, and each of them reads all keys and values from L2. That pays
    while at most two blocks read the same ones; or while it takes less than the other kernels, which keep fewer
    multiprocessors busy, need to start and to go through the keys one tile after another. Measured on an H200:
    docs/kernels/small.md.
    """
    if why_not(problem, device) is not None:
        return None
    configuration = configuration_for(problem, device)
    if configuration.single_pass:
        return Choice(KernelKind.SMALL, configuration, "few keys: all are held in registers at once")
    shared = f"{configuration.warps} warps x {configuration.cluster} blocks"
    if configuration.splits > 1:
        shared += f" x {configuration.splits} splits of the grid"
    return Choice(KernelKind.SMALL, configuration, f"few rows: the keys are split over {shared}")


def why_not(problem: Problem, device: Device) -> str | None:
    refusal = why_not_type(problem.dtype, device)
    if refusal is not None:
        return refusal
    if not _countable(problem):
        return "it cannot count so many heads, rows or keys"
    configuration = configuration_for(problem, device)
    blocks, work = _row_slices(problem).blocks(configuration.rows), _work(problem, device)
    if blocks > _MOST_ROW_BLOCKS * work.row_slices.slices and not _pays(problem, configuration, device, work):
        return (
            f"its {blocks} blocks of {configuration.rows} rows would each read all keys; kernels with taller tiles "
            "should take less time"
        )
    return None


def configuration_for(problem: Problem, device: Device) -> SmallConfiguration:
    """How this kernel would do a problem, whether or not another one would be faster.

    Beyond what registers hold, keys are shared by a cluster or by the whole grid.
    """
    architecture, head_dim = device.architecture, problem.head_dim
    work = _work(problem, device)
    held = configs.latency(
        architecture, head_dim, work.keys, work.row_slices, work.multiprocessors, problem.causal
    )
    return held if held is not None else share_keys(architecture, head_dim, work)


def _pays(problem: Problem, configuration: SmallConfiguration, device: Device, work: Work) -> bool:
    """Whether this kernel should take less than one with tall tiles takes for one of them.

    By its estimated time where there is one, else by what its blocks read, at about 4.5 MB per us. The others start 2
    us later and take 9 us per 1024 keys up to head dim 128, twice that at 256.
    """
    one_of_passes = not configuration.single_pass and configuration.splits == 1
    if one_of_passes and measured(device.architecture, problem.head_dim, work):
        per_key = next(us for most, us in _TALL_US_PER_KEY.items() if problem.head_dim <= most)
        tall = _TALL_US + per_key * work.keys
        ragged = -work.keys % _TALL_KEYS
        if ragged and (
            problem.head_dim > 64 or work.keys > 2 * _TALL_KEYS
        ):  # else the portable kernel is next
            tall += per_key * ragged + _RAGGED_US
        return microseconds(configuration, work) < _SOONER * tall
    kv_bytes = 2 * problem.seqlen_k * problem.head_dim * problem.dtype.itemsize
    per_key = _MOST_BYTES_PER_KEY * max(1, problem.head_dim / 128)
    return work.row_slices.blocks(configuration.rows) * kv_bytes <= _MOST_BYTES + per_key * work.keys


def _work(problem: Problem, device: Device) -> Work:
    unseen = min(problem.seqlen_q, problem.seqlen_k) / (2 * problem.seqlen_k) if problem.seqlen_k else 0.0
    seen = 1 - unseen if problem.causal else 1.0
    return Work(problem.seqlen_k, _row_slices(problem), device.multiprocessors, seen)


def _row_slices(problem: Problem) -> RowSlices:
    return RowSlices(
        slices=problem.batch * problem.num_kv_heads,
        rows=problem.seqlen_q * (problem.num_heads // problem.num_kv_heads),
    )


def _countable(problem: Problem) -> bool:
    """Whether a grid and 32 bits hold all that the kernel counts."""
    group = problem.num_heads // problem.num_kv_heads
    tensors = (problem.query_strides, problem.key_strides, problem.value_strides, problem.output_strides)
    return (
        problem.batch <= _MOST_GRID_YZ
        and problem.num_kv_heads <= _MOST_GRID_YZ
        # 32 bits hold rows, keys, row strides, and what divides a packed row by the group's size.
        and problem.seqlen_q * group < _NO_MASK
        and problem.seqlen_q * group * group < 1 << 32
        and problem.seqlen_k < _NO_MASK
        and all(row * problem.dtype.itemsize < 1 << 32 for _, _, row in tensors)
    )


def kernels(architecture: str) -> list[CudaKernel]:
    return [
        kernel(configuration, dtype, architecture)
        for configuration in configs.all_configurations(architecture)
        for dtype in element_types(architecture)
    ]


def kernel(configuration: SmallConfiguration, dtype: torch.dtype, architecture: str) -> CudaKernel:
    """The kernel in one configuration, which may be another architecture's."""
    return CudaKernel(
        source="attention_small.cu",
        function="attention_small",
        architecture=architecture,
        macros={
            "HEAD_DIM": configuration.head_dim,
            "PADDED": int(configuration.padded),
            "ROW_TILES": configuration.row_tiles,
            "WARPS": configuration.warps,
            "KEY_TILES": configuration.key_tiles,
            "CLUSTER": configuration.cluster,
            "SINGLE_PASS": int(configuration.single_pass),
            "LATE_VALUES": int(configuration.late_values),
            "SPLIT": int(configuration.splits > 1),
            "DEPENDENT": int(configuration.dependent),
            "ELEMENT_BF16": int(dtype == torch.bfloat16),
            "MMA_K": configuration.mma_k,
        },
        threads_per_block=configuration.threads,
        dynamic_shared_bytes=0,
        cluster_blocks=configuration.cluster,
    )


def check(problem: Problem, configuration: Any) -> None:
    if not isinstance(configuration, SmallConfiguration):
        raise InputError(f"the small kernel takes a SmallConfiguration, not {configuration!r}")
    head_dim, most = configuration.head_dim, configuration.keys_per_pass
    if problem.head_dim > head_dim or (problem.head_dim < head_dim and not configuration.padded):
        expected = f"at most {head_dim}" if configuration.padded else f"{head_dim}"
        raise InputError(
            f"head_dim is {problem.head_dim}; expected {expected} for ({configuration.label}): choose again"
        )
    if configuration.single_pass and problem.seqlen_k > most:
        raise InputError(
            f"seqlen_k is {problem.seqlen_k}; expected at most {most} for ({configuration.label}): choose again"
        )
    if not _countable(problem):
        raise InputError("the small kernel cannot count so many heads, rows or keys; choose another kernel")
    if configuration.splits > 1 and arrival_counters(problem, configuration) > MOST_ARRIVALS:
        raise InputError(
            f"({configuration.label}) needs {arrival_counters(problem, configuration)} counters for these heads and "
            f"rows; expected at most {MOST_ARRIVALS}: choose one split"
        )


class _Meeting(NamedTuple):
    """Where the splits of launches on a stream meet: addresses of their results, and of counters."""

    partials: int
    arrivals: int
    floats: int
    memory: torch.Tensor


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.meetings: dict[tuple[int, int], _Meeting] = {}
        """By device and stream, of which this thread's launches run one after another."""


_own = _OfThread()


def _split_launch(launcher: Launcher, floats: int, arrivals: int, pool: TicketPool, device: int) -> Launch:
    """Of blocks that meet in device memory: that of the stream, or where it is captured, or much, of each call.

    Args:
        floats: of the partial results.
        arrivals: counters.
    """
    allocate, take, start, buffer = cuda_allocator(), pool.take, launcher.start_at, launcher.buffer

    def launch(query: int, key: int, value: int, output: int, lse: int, stream: int) -> None:
        if floats > _MOST_KEPT_FLOATS or (stream and is_capturing()):
            # Given back to the allocator when this returns, and by it only to what comes later on the stream.
            workspace = allocate((floats,), (1,), torch.float32)
            write_split_addresses(buffer, workspace.data_ptr(), take(stream, arrivals))
            start(query, key, value, output, lse, stream)
            return
        meeting = _own.meetings.get((device, stream))
        if meeting is None or meeting.floats < floats:
            # Enough for the next lengths too. What was there goes to what comes later on the stream.
            size = min(2 * floats, _MOST_KEPT_FLOATS)
            workspace = kept(lambda: allocate((size,), (1,), torch.float32))
            meeting = _Meeting(workspace.data_ptr(), take(stream, arrivals), size, workspace)
            _own.meetings[device, stream] = meeting
        write_split_addresses(buffer, meeting.partials, meeting.arrivals)
        start(query, key, value, output, lse, stream)

    return launch


def plan(problem: Problem, configuration: Any, device: Device, *, allow_defects: bool = False) -> LaunchPlan:
    check(problem, configuration)
    compiled = kernel(configuration, problem.dtype, device.architecture)
    row_blocks = _row_blocks(problem, configuration)
    grid = (
        row_blocks * configuration.splits * configuration.cluster,
        problem.num_kv_heads,
        problem.batch,
    )
    split = configuration.splits > 1
    size = _ARGUMENT_BYTES + (_SPLIT_BYTES if split else 0)
    launcher = loaded(
        compiled, device, grid, size, dependent=configuration.dependent, allow_defects=allow_defects
    )
    write_arguments(launcher.buffer, problem)
    if not split:
        return LaunchPlan(launcher.start_at)
    write_split_arguments(launcher.buffer, problem, configuration)
    pool = arrival_pool(device.index)
    if not torch.cuda.is_current_stream_capturing():
        pool.reserve()
    floats, arrivals = workspace_floats(problem, configuration), arrival_counters(problem, configuration)
    return LaunchPlan(_split_launch(launcher, floats, arrivals, pool, device.index))


def workspace_floats(problem: Problem, configuration: SmallConfiguration) -> int:
    """Floats that the splits of a launch leave for each other."""
    sets = problem.batch * problem.num_kv_heads * _row_blocks(problem, configuration)
    return sets * configuration.quads * configuration.splits * _PARTIAL_FLOATS


def arrival_counters(problem: Problem, configuration: SmallConfiguration) -> int:
    """Counters of a launch: one for each warp of a set of query rows, the same in all splits."""
    sets = problem.batch * problem.num_kv_heads * _row_blocks(problem, configuration)
    return sets * configuration.cluster * configuration.warps


def _row_blocks(problem: Problem, configuration: SmallConfiguration) -> int:
    return -(-_row_slices(problem).rows // configuration.rows)


def write_arguments(buffer: Any, problem: Problem) -> None:
    """All fields of the kernel's `Parameters` but the addresses."""
    element = problem.dtype.itemsize
    tensors = (problem.query_strides, problem.key_strides, problem.value_strides, problem.output_strides)
    for index, strides in enumerate(tensors):
        _TENSOR.pack_into(
            buffer, _TENSORS_AT + index * _TENSOR.size, *(element * stride for stride in strides)
        )
    group = problem.num_heads // problem.num_kv_heads
    _REST.pack_into(
        buffer,
        _REST_AT,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.seqlen_k - problem.seqlen_q if problem.causal else _NO_MASK,
        group,
        (1 << 32) // group + 1 if group > 1 else 0,
        problem.softmax_scale * math.log2(math.e),
        problem.head_dim,
    )


def write_split_arguments(buffer: Any, problem: Problem, configuration: SmallConfiguration) -> None:
    """The fields that only a kernel with splits has, but the addresses."""
    counts = configuration.splits, _row_blocks(problem, configuration)
    _SPLIT_COUNTS.pack_into(buffer, _SPLIT_AT + _SPLIT_ADDRESSES.size, *counts)


def write_split_addresses(buffer: Any, partials: int, arrivals: int) -> None:
    """Where the splits of one launch meet."""
    _SPLIT_ADDRESSES.pack_into(buffer, _SPLIT_AT, partials, arrivals)
