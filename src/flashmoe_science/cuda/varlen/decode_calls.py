"""What calls of both decode kernels share: most of the argument, the workspace, and calls like an earlier one."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashmoe_science.configs.attention import decode as configs
from flashmoe_science.configs.attention.decode import KEY_TILE, DecodeConfiguration
from flashmoe_science.configs.attention.decode_hopper import DecodeHopperConfiguration
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.driver import check, library
from flashmoe_science.cuda.launch import Launcher
from flashmoe_science.cuda.repeat import cuda_allocator, raw_stream
from flashmoe_science.cuda.steady import Target
from flashmoe_science.cuda.tickets import TicketPool, is_capturing
from flashmoe_science.cuda.varlen.arguments import division
from flashmoe_science.cuda.varlen.decode_workspace import arrival_counters, shared_workspace, workspace_bytes
from flashmoe_science.errors import InputError
from flashmoe_science.varlen.problem import REPEATED, Problem, Repeat, Run, Sizes, Tensors

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
ALIGNMENT = 16
_MISALIGNED = (
    f"query, key, value or out does not start at a multiple of {ALIGNMENT} bytes (a view at an odd offset); "
    "pass a .clone()"
)


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


def reads_pairs(problem: Problem) -> bool:
    """Whether a lane reads 16 codes of FP8 at once; where the caches begin is checked by each call."""
    if problem.quantized is None or not (problem.head_dim % 64 == 0 or problem.value_dim % 128 == 0):
        return False
    return all(stride % ALIGNMENT == 0 for stride in (*problem.key_strides, *problem.value_strides))


def _cache_step(problem: Problem) -> int:
    """What the addresses of caches are multiplied with to be multiples of 16 bytes."""
    return 1 if problem.quantized is None or reads_pairs(problem) else 2


def shared_by_launches(
    ready: Ready,
    problem: Problem,
    sizes: Sizes,
    device: Device,
    stream: int,
    capturing: bool,
    more_counters: int = 0,
) -> tuple[tuple[int, int], torch.Tensor | None]:
    """Addresses of workspace and counters, for the next launch on the stream; and the workspace if no other has it.

    Args:
        more_counters: behind those of `arrival_counters`.
    """
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
    counters = arrival_counters(most, ready.configuration) + more_counters
    shared = address, ready.pool.take(stream, counters)
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


OWN_PLACES = Places()
"""Of a launch whose argument is the parameters alone."""


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
    mapped = places.key != at + OWN_PLACES.key
    pack_address = _ADDRESS.pack_into
    pool, shared_of, address_of = ready.pool, ready.of_stream.get, torch.Tensor.data_ptr
    cache_alignment = ALIGNMENT // cache_step
    words = {name: word + at // _ADDRESS.size for name, word in _WORDS.items()}
    words |= {"key": places.key // _ADDRESS.size, "value": places.value // _ADDRESS.size}
    target = Target(
        launcher,
        words,
        {"query": ALIGNMENT, "out": ALIGNMENT, "key": cache_alignment, "value": cache_alignment},
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
        if (addresses[0] | cache_step * (addresses[1] | addresses[2]) | addresses[3]) % ALIGNMENT:
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


def write_plan(buffer: Any, problem: Problem, grid: int, team: int, key_tile: int = KEY_TILE) -> None:
    """The fields of the kernel's `Parameters` that are the same in all calls of a problem.

    Args:
        team: divides the grid and the key/value heads.
        key_tile: keys of a tile of the kernel's.
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
        problem.split_keys // key_tile,
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
        if (queries | cache_step * (keys | values) | outputs) % ALIGNMENT:
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
