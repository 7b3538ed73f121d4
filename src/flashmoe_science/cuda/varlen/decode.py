"""The decode kernel (`kernels/cuda/attention_decode.cu`): few query rows of each sequence, lengths on the device.

What is launched depends on no length that lies on the device. Of what the host knows, the number of sequences and
whether the bound on keys is short choose blocks of a cluster. The grid has a block for each multiprocessor with room,
and the blocks find their shares of the keys themselves.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from flashmoe_science.configs.attention import decode as configs
from flashmoe_science.configs.attention.decode import KEY_TILE, MOST_DIM, Cache, DecodeConfiguration, Pages
from flashmoe_science.configs.attention.decode_hopper import DecodeHopperConfiguration
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device, why_not_type
from flashmoe_science.cuda.driver import check, library, load
from flashmoe_science.cuda.launch import Launcher, clusters_at_once
from flashmoe_science.cuda.repeat import cuda_allocator, raw_stream
from flashmoe_science.cuda.steady import Target
from flashmoe_science.cuda.tickets import TicketPool, decode_arrival_pool, is_capturing
from flashmoe_science.cuda.varlen.arguments import division
from flashmoe_science.cuda.varlen.decode_workspace import arrival_counters, shared_workspace, workspace_bytes
from flashmoe_science.cuda.varlen.kind import VarlenKernel
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import limits
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.varlen.problem import (
    REPEATED,
    Problem,
    Repeat,
    Repeatable,
    Run,
    Sizes,
    Tensors,
)

MOST_QUERIES = 15
"""Query tokens of a sequence that this kernel is for, by `kind.bucket`: 8, and what is in one bucket with them."""
_OF_CALL = struct.Struct("=15Q2q2i")  # addresses, strides of tables, tokens, batch
_OF_PLAN = struct.Struct("=4Q2QI4x2QI4x6q3i6I3i3fi2Ii2I4x")
_OF_STREAM = struct.Struct("=2Q2q2i")  # addresses of workspace and counters, and what follows them
_OF_STREAM_AT = _OF_CALL.size - _OF_STREAM.size
_ADDRESS = struct.Struct("=Q")
_TREE_AT = _OF_CALL.size + _OF_PLAN.size
"""Of a call too, and after all that kernels without trees read."""
_WORDS = {name: REPEATED.index(name) + (name in REPEATED[4:]) for name in REPEATED} | {
    "output": 3,
    "lse": 4,
    "tree_mask": _TREE_AT // _ADDRESS.size,
}
"""Of 8 bytes: where the addresses of a call are."""
ARGUMENT_BYTES = _TREE_AT + _ADDRESS.size
_UNLIMITED = 1 << 30
_ALIGNMENT = 16
_MISALIGNED = (
    f"query, key, value or out does not start at a multiple of {_ALIGNMENT} bytes (a view at an odd offset); "
    "pass a .clone()"
)
_BUILT_AHEAD = (64, 128)
"""Head dimensions."""
_BEFORE_FP8 = ("sm_75", "sm_80", "sm_86")


def why_not(problem: Problem, device: Device, most_queries: int) -> str | None:
    """See `select.KernelModule`."""
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"it does not take {problem.dtype}"
    refusal = why_not_type(problem.dtype, device)
    if refusal is not None:
        return refusal
    if max(problem.head_dim, problem.value_dim) > MOST_DIM:
        return f"head_dim and value_dim are at most {MOST_DIM}"
    caches = problem.key_strides, problem.value_strides
    strides = (problem.query_strides, *caches, problem.output_strides)
    if any(stride * 2 % _ALIGNMENT for each in strides for stride in each):
        return f"rows must begin at multiples of {_ALIGNMENT} bytes, those of FP8 at multiples of {_ALIGNMENT // 2}"
    if any(stride < 0 for each in strides for stride in each):
        return "strides must not be negative"
    most = configs.most_rows(max(problem.head_dim, problem.value_dim), *_features(problem))
    return why_not_rows(problem, most_queries, most)


def why_not_rows(problem: Problem, most_queries: int, most: int) -> str | None:
    """Why a kernel for few queries does not take rows of queries or of keys; ``most``: of queries, that go through the
    keys together.
    """
    if any(token * 2 >= 1 << 32 for _, token, _ in (problem.key_strides, problem.value_strides)):
        return "rows of keys and values are too far apart"
    fewest = (most_queries + 1) // 2 * (problem.num_heads // problem.num_kv_heads)
    if most_queries > MOST_QUERIES or fewest > most:
        return f"it is for few queries: up to {most} rows of heads that share keys"
    return None


def _features(problem: Problem) -> tuple[Pages, bool]:
    return Pages.of(problem.page_size), problem.softcap != 0 or problem.alibi


def configuration_for(problem: Problem, sizes: Sizes, device: Device) -> DecodeConfiguration:
    rows = sizes.max_seqlen_q * (problem.num_heads // problem.num_kv_heads)
    usual = configs.configuration(
        device.architecture,
        problem.head_dim,
        problem.value_dim,
        rows,
        *_features(problem),
        _cache(problem),
        pairs=_reads_pairs(problem),
    )
    limited = problem.window_left >= 0 or problem.chunk > 0
    hidden = limited and problem.split_keys > 0 and usual.pages is Pages.TILES
    chosen = replace(usual, chunk=problem.chunk > 0, hidden_tiles=hidden, tree=problem.tree)
    if problem.split_keys or not configs.may_cluster(chosen):
        return chosen
    sets = sizes.batch * problem.num_kv_heads * -(-rows // usual.rows)
    seen = problem.window_left + sizes.max_seqlen_q if problem.window_left >= 0 else sizes.max_seqlen_k
    most_keys = min(seen, sizes.max_seqlen_k)
    return replace(
        chosen, cluster=configs.cluster_for(device.architecture, sets, most_keys, device.multiprocessors)
    )


def choose(problem: Problem, device: Device, sizes: Sizes, tokens: int) -> Choice:
    """See `select.KernelModule`."""
    configuration = configuration_for(problem, sizes, device)
    over = f"clusters of {configuration.cluster} blocks" if configuration.cluster > 1 else "all blocks"
    return Choice(VarlenKernel.DECODE, configuration, f"few queries: the keys are split over {over}")


def _reads_pairs(problem: Problem) -> bool:
    """Whether a lane reads 16 codes of FP8 at once; where the caches begin is checked by each call."""
    if problem.quantized is None or not (problem.head_dim % 64 == 0 or problem.value_dim % 128 == 0):
        return False
    return all(stride % _ALIGNMENT == 0 for stride in (*problem.key_strides, *problem.value_strides))


def _cache_step(problem: Problem) -> int:
    """What the addresses of caches are multiplied with to be multiples of 16 bytes."""
    return 1 if problem.quantized is None or _reads_pairs(problem) else 2


def _cache(problem: Problem) -> Cache:
    if problem.quantized is None:
        return Cache.PLAIN
    each_key = any(scale is not None and scale[1] > 0 for scale in problem.quantized)
    return Cache.SCALED_KEYS if each_key else Cache.SCALED_HEADS


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
            "CACHE": int(configuration.cache),
            # Left out where they are not needed: kernels without them are what they were before there were these.
            **({"CHUNK": 1} if configuration.chunk else {}),
            **({"HIDDEN_TILES": 1} if configuration.hidden_tiles else {}),
            **({"TREE": 1} if configuration.tree else {}),
            **({"PAIRS": 1} if configuration.pairs else {}),
            **({"CLUSTER": configuration.cluster} if configuration.cluster > 1 else {}),
            "SCORE_CHANGES": int(configuration.score_changes),
            "DEPENDENT": int(configuration.dependent),
            "QUERY_BF16": int(dtype == torch.bfloat16),
            "ELEMENT_BF16": int(dtype == torch.bfloat16 and not configuration.multiplies_half),
            "NATIVE_FP8": int(architecture not in _BEFORE_FP8),
            "MMA_K": configuration.mma_k,
            "NATIVE_CP_ASYNC": int(limits(architecture).cp_async),
            "NATIVE_REDUX": int(limits(architecture).cp_async),
        },
        threads_per_block=configuration.threads,
        dynamic_shared_bytes=configuration.shared_bytes,
        cluster_blocks=configuration.cluster,
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
    own, index = _OfThread(), device.index
    most = device.multiprocessors
    write = call_writer(problem)

    def run(tensors: Tensors, sizes: Sizes) -> None:
        stream = raw_stream(index)
        capturing = stream != 0 and is_capturing()
        key = _key(sizes, most)
        ready = own.ready.get(key)
        if ready is None:
            ready = own.ready[key] = _make_ready(own, problem, sizes, device, capturing)
        # The workspace lives until the launch is made: what is allocated after it may lie where it does.
        shared, _workspace = shared_by_launches(ready, problem, sizes, device, stream, capturing)
        write(ready.launcher.buffer, tensors, sizes, *shared)
        ready.launcher.start(stream)

    def repeat(tensors: Tensors, sizes: Sizes, own_output: bool) -> Repeat | None:
        ready = own.ready.get(_key(sizes, most))
        if ready is None or problem.split_keys:
            return None
        return repeat_of(problem, ready, tensors, sizes, index, run, own_output, _PLACES)

    return Repeatable(run, repeat)


def shared_by_launches(
    ready: Ready, problem: Problem, sizes: Sizes, device: Device, stream: int, capturing: bool
) -> tuple[tuple[int, int], torch.Tensor | None]:
    """Addresses of workspace and counters, for the next launch on the stream; and the workspace if no other has it."""
    allocate, most, workspace = cuda_allocator(), device.multiprocessors, None
    if not capturing:
        if ready.pool.is_scarce:
            ready.pool.reserve()
        shared = ready.of_stream.get(stream)
        if shared is not None:
            return shared, None
    if capturing or problem.split_keys:  # with which the workspace is as large as the call
        size = workspace_bytes(problem, sizes, ready.configuration, most)
        workspace = allocate((size,), (1,), torch.uint8)
        address = workspace.data_ptr()
    else:
        address = shared_workspace(allocate, device.index, stream, most).data_ptr()
    # After the workspace: what is allocated behind counters may lie where they do.
    shared = address, ready.pool.take(stream, arrival_counters(most, ready.configuration))
    if workspace is None:
        ready.of_stream[stream] = shared
    return shared, workspace


class Places(NamedTuple):
    """Where a launch's buffer has things: bytes from its start."""

    parameters: int = 0
    """The kernel's `Parameters`."""
    key: int = _ADDRESS.size
    """The address of the keys that are read: that of the parameters, or a tensor map's."""
    value: int = 2 * _ADDRESS.size
    """Likewise."""


_PLACES = Places()


def repeat_of(
    problem: Problem,
    ready: Ready,
    like: Tensors,
    sizes: Sizes,
    index: int,
    run: Run,
    own_output: bool,
    places: Places,
) -> Repeat:
    """Calls whose tensors are like these: all but their addresses is in the argument of a launcher of their own, as
    long as the stream is the same.

    Every line of the function runs once a layer of a step, where there is no compiler for `cuda.steady`.
    """
    cache_step = _cache_step(problem)
    inputs = like._asdict() | {"out": like.output if own_output else None}
    names = [name for name in REPEATED if inputs[name] is not None]
    optional = (None if name == "out" else inputs[name] for name in REPEATED[4:-1])
    layout = "".join("8x" if tensor is None else "Q" for tensor in (like.lse, *optional))
    pack = struct.Struct(f"=4Q{layout}").pack_into  # what is left out is written as 0
    has_tree = problem.tree
    table, slopes = like.block_table, like.alibi_slopes
    rest = (
        0 if table is None else table.stride(0),
        slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        like.query.shape[0],
        sizes.batch,
    )
    launcher = ready.launcher.twin()
    buffer, again = launcher.buffer, launcher.again
    ctypes.memmove(buffer, ready.launcher.buffer, len(buffer))
    at = places.parameters
    ctypes.memset(ctypes.addressof(buffer) + at, 0, _OF_CALL.size)
    mapped = places != _PLACES
    pack_address = _ADDRESS.pack_into
    pool, shared_of, address_of = ready.pool, ready.of_stream.get, torch.Tensor.data_ptr
    cache_alignment = _ALIGNMENT // cache_step
    words = {name: word + at // _ADDRESS.size for name, word in _WORDS.items()}
    words |= {"key": places.key // _ADDRESS.size, "value": places.value // _ADDRESS.size}
    target = Target(
        launcher,
        words,
        {"query": _ALIGNMENT, "out": _ALIGNMENT, "key": cache_alignment, "value": cache_alignment},
        pool,
        index,
        configs.lengths_like(sizes.max_seqlen_k),
    )
    written_for = -1

    def write_for(stream: int) -> bool:
        """Whether the argument is for launches on the stream now, which nobody captures."""
        nonlocal written_for
        shared = shared_of(stream)
        if shared is None or pool.is_scarce or (stream and is_capturing()):
            return False
        _OF_STREAM.pack_into(buffer, at + _OF_STREAM_AT, *shared, *rest)
        launcher.config.stream = target.stream.value = written_for = stream
        return True

    def call(tensors: tuple[torch.Tensor, ...], output: torch.Tensor, lse: torch.Tensor | None) -> None:
        stream = raw_stream(index)
        other = stream != written_for or pool.is_scarce or (stream and is_capturing())
        if other and not write_for(stream):
            given = dict(zip(names, tensors, strict=True)) | {"output": output, "lse": lse}
            run(Tensors._make(given.get(name) for name in Tensors._fields), sizes)
            return
        addresses = [*map(address_of, tensors)]
        if not own_output:
            addresses.insert(3, output.data_ptr())
        if lse is not None:
            addresses.insert(4, lse.data_ptr())
        if (addresses[0] | cache_step * (addresses[1] | addresses[2]) | addresses[3]) % _ALIGNMENT:
            raise InputError(_MISALIGNED)
        if has_tree:
            pack_address(buffer, at + _TREE_AT, addresses.pop())
        pack(buffer, at, *addresses)
        if mapped:  # then the kernel does not read the parameters' own
            pack_address(buffer, places.key, addresses[1])
            pack_address(buffer, places.value, addresses[2])
        status = again()
        if status:
            check(library(), status, "cuLaunchKernelEx")

    write_for(raw_stream(index))
    return Repeat(call, target)


class Ready(NamedTuple):
    """A launcher of a thread, with what its launches share."""

    configuration: DecodeConfiguration | DecodeHopperConfiguration
    launcher: Launcher
    pool: TicketPool
    of_stream: dict[int, tuple[int, int]]
    """Addresses of the memory in which blocks leave each other results, and of counters: launches on a stream, which
    run one after another, share them.
    """


class _OfThread(threading.local):
    """Launchers have a buffer that is read during the launch, so each thread has its own."""

    def __init__(self) -> None:
        self.ready: dict[tuple[int, int, range], Ready] = {}
        """By `_key`."""
        self.launchers: dict[DecodeConfiguration, Launcher] = {}


def _key(sizes: Sizes, multiprocessors: int) -> tuple[int, int, range]:
    """What the configuration of a problem's calls depends on."""
    return sizes.max_seqlen_q, min(sizes.batch, multiprocessors), configs.lengths_like(sizes.max_seqlen_k)


def _make_ready(own: _OfThread, problem: Problem, sizes: Sizes, device: Device, capturing: bool) -> Ready:
    configuration = configuration_for(problem, sizes, device)
    launcher = own.launchers.get(configuration)
    if launcher is None:
        launcher = own.launchers[configuration] = _make_launcher(configuration, problem, device, capturing)
    return Ready(configuration, launcher, decode_arrival_pool(device.index), {})


def _make_launcher(
    configuration: DecodeConfiguration, problem: Problem, device: Device, capturing: bool
) -> Launcher:
    compiled = kernel(configuration, problem.dtype, device.architecture)
    function = load(compiled, device.index, capturing, allow_defects=True)
    grid = device.multiprocessors
    if configuration.cluster > 1:
        # Workspace and counters are for a block on each multiprocessor, of which some kernels would run two.
        clusters = min(clusters_at_once(function, compiled), grid // configuration.cluster)
        if clusters == 0:  # a part of a GPU may have no such cluster's room
            return _make_launcher(replace(configuration, cluster=1), problem, device, capturing)
        grid = configuration.cluster * clusters
    team = 1 if problem.split_keys else configs.team_for(problem.num_kv_heads, grid)
    grid -= grid % math.lcm(configuration.cluster, team)
    launcher = Launcher(function, (grid, 1, 1), compiled, ARGUMENT_BYTES, dependent=configuration.dependent)
    write_plan(launcher.buffer, problem, grid, team)
    return launcher


def write_plan(buffer: Any, problem: Problem, grid: int, team: int) -> None:
    """The fields of the kernel's `Parameters` that are the same in all calls of a problem.

    Args:
        team: divides the grid and the key/value heads; 1 with `split_keys`.
    """
    element = problem.dtype.itemsize
    group = problem.num_heads // problem.num_kv_heads
    log2_e = math.log2(math.e)
    query, output = (
        [element * stride for stride in each] for each in (problem.query_strides, problem.output_strides)
    )
    caches, scales = [], []
    of_cache = element if problem.quantized is None else 1
    for page, token, head in (problem.key_strides, problem.value_strides):
        caches += [of_cache * page, of_cache * head, of_cache * token]
    for scale in problem.quantized or (None, None):
        page, token, head = scale or (0, 0, 0)
        scales += [page, head, token]
    cap = problem.softcap
    _OF_PLAN.pack_into(
        buffer,
        _OF_CALL.size,
        *query,
        *output,
        *caches,
        *scales,
        problem.num_kv_heads,
        group,
        problem.page_size,
        *division(grid // team),
        *division(group),
        *division(problem.page_size or 1),
        _UNLIMITED if problem.window_left < 0 else min(problem.window_left, _UNLIMITED),
        _UNLIMITED if problem.window_right < 0 else min(problem.window_right, _UNLIMITED),
        problem.split_keys // KEY_TILE,
        problem.softmax_scale * log2_e,
        cap * log2_e,
        2 * log2_e * problem.softmax_scale / cap if cap else 0.0,
        team,
        *division(team),
        problem.chunk,
        *division(problem.chunk or 1),
    )


def call_writer(problem: Problem) -> Callable[[Any, Tensors, Sizes, int, int], None]:
    """What writes the other fields: into a buffer, of tensors and sizes, with the addresses of workspace and counters.

    It raises InputError for a tensor that does not begin at a multiple of 16 bytes.
    """
    cache_step = _cache_step(problem)
    pack, paged, used, sinks, alibi = (
        _OF_CALL.pack_into,
        problem.page_size > 0,
        problem.used_keys,
        problem.sinks,
        problem.alibi,
    )

    def write(buffer: Any, tensors: Tensors, sizes: Sizes, workspace: int, arrivals: int) -> None:
        (
            query,
            key,
            value,
            output,
            lse,
            starts,
            key_starts,
            table,
            lengths,
            sink,
            slopes,
            key_scale,
            value_scale,
            tree,
        ) = tensors
        queries, keys, values, outputs = query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr()
        if (queries | cache_step * (keys | values) | outputs) % _ALIGNMENT:
            raise InputError(_MISALIGNED)
        pack(
            buffer,
            0,
            queries,
            keys,
            values,
            outputs,
            0 if lse is None else lse.data_ptr(),
            starts.data_ptr(),
            0 if paged else key_starts.data_ptr(),  # type: ignore[union-attr]
            lengths.data_ptr() if used else 0,  # type: ignore[union-attr]
            table.data_ptr() if paged else 0,  # type: ignore[union-attr]
            sink.data_ptr() if sinks else 0,  # type: ignore[union-attr]
            slopes.data_ptr() if alibi else 0,  # type: ignore[union-attr]
            0 if key_scale is None else key_scale.data_ptr(),
            0 if value_scale is None else value_scale.data_ptr(),
            workspace,
            arrivals,
            table.stride(0) if paged else 0,  # type: ignore[union-attr]
            slopes.stride(0) if alibi and slopes.dim() == 2 else 0,  # type: ignore[union-attr]
            query.shape[0],
            sizes.batch,
        )
        if tree is not None:
            _ADDRESS.pack_into(buffer, _TREE_AT, tree.data_ptr())

    return write
