"""The decode kernel (`kernels/cuda/attention_decode.cu`): few query rows of each sequence, lengths on the device.

What is launched depends on no length that lies on the device. Of what the host knows, the number of sequences and
whether the bound on keys is short choose blocks of a cluster. The grid has a block for each multiprocessor with room,
and the blocks find their shares of the keys themselves.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import torch

from flashmoe_science.configs.attention import decode as configs
from flashmoe_science.configs.attention.decode import MOST_DIM, Cache, DecodeConfiguration, Pages
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device, why_not_type
from flashmoe_science.cuda.driver import load
from flashmoe_science.cuda.launch import Launcher, clusters_at_once
from flashmoe_science.cuda.repeat import raw_stream
from flashmoe_science.cuda.tickets import decode_arrival_pool, is_capturing
from flashmoe_science.cuda.varlen import decode_calls as calls
from flashmoe_science.cuda.varlen.kind import VarlenKernel, most_keys_seen, packed_rows
from flashmoe_science.jit.limits import limits
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.varlen.problem import (
    Problem,
    Repeat,
    Repeatable,
    Run,
    Sizes,
    Tensors,
)

_BUILT_AHEAD = (64, 128)
"""Head dimensions."""
_MUCH_WORK = 1 << 10, 1 << 13, 132
"""Sets of rows, keys, and multiprocessors of a call whose kernel is built, too."""
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
    if any(stride * 2 % calls.ALIGNMENT for each in strides for stride in each):
        least = calls.ALIGNMENT
        return f"rows must begin at multiples of {least} bytes, those of FP8 at multiples of {least // 2}"
    if any(stride < 0 for each in strides for stride in each):
        return "strides must not be negative"
    most = configs.most_rows(max(problem.head_dim, problem.value_dim), *_features(problem))
    return calls.why_not_rows(problem, most_queries, most)


def _features(problem: Problem) -> tuple[Pages, bool]:
    return Pages.of(problem.page_size), problem.softcap != 0 or problem.alibi


def configuration_for(problem: Problem, sizes: Sizes, device: Device) -> DecodeConfiguration:
    rows = packed_rows(problem, sizes)
    usual = configs.configuration(
        device.architecture,
        problem.head_dim,
        problem.value_dim,
        rows,
        *_features(problem),
        _cache(problem),
        pairs=calls.reads_pairs(problem),
    )
    limited = problem.window_left >= 0 or problem.chunk > 0
    hidden = limited and problem.split_keys > 0 and usual.pages is Pages.TILES
    chosen = replace(
        usual, chunk=problem.chunk > 0, hidden_tiles=hidden, tree=problem.tree, only=problem.only
    )
    if problem.split_keys:  # bits, and so the kernel, depend on nothing else in the batch
        return chosen
    sets = sizes.batch * problem.num_kv_heads * -(-rows // usual.rows)
    call = sets, most_keys_seen(problem, sizes), device.multiprocessors
    chosen = configs.queued(chosen, device.architecture, *call)
    return configs.clustered(chosen, device.architecture, configs.cluster_for(device.architecture, *call))


def choose(problem: Problem, device: Device, sizes: Sizes, tokens: int) -> Choice:
    """See `select.KernelModule`."""
    configuration = configuration_for(problem, sizes, device)
    over = f"clusters of {configuration.cluster} blocks" if configuration.cluster > 1 else "all blocks"
    return Choice(VarlenKernel.DECODE, configuration, f"few queries: the keys are split over {over}")


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
            **({"QUEUE": configuration.queue} if configuration.queue else {}),
            **({"CLUSTER": configuration.cluster} if configuration.cluster > 1 else {}),
            **({"ONLY": configuration.only} if configuration.only else {}),
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
    """What is built ahead of time: one token, pages of 16 and more, few keys and many. Others are compiled at their
    first call.
    """
    dtype = torch.bfloat16 if limits(architecture).bfloat16 else torch.float16
    short = [configs.configuration(architecture, dim, dim, 8, Pages.TILES, False) for dim in _BUILT_AHEAD]
    long = [configs.queued(each, architecture, *_MUCH_WORK) for each in short]
    return [kernel(each, dtype, architecture) for each in dict.fromkeys(short + long)]


def prepare(problem: Problem, device: Device, most_queries: int) -> Run:
    """See `flashmoe_science.varlen.problem.Backend`; the device is current. For problems that `why_not` is None for.

    Raises:
        InputError: a tensor does not begin at a multiple of 16 bytes, or `workspace_bytes` does; both in the run.
        BuildError, DeviceError: see `driver.load`.
    """
    own, index = _OfThread(), device.index
    most = device.multiprocessors
    write = calls.call_writer(problem)

    def run(tensors: Tensors, sizes: Sizes) -> None:
        stream = raw_stream(index)
        capturing = stream != 0 and is_capturing()
        key = _key(sizes, most)
        ready = own.ready.get(key)
        if ready is None:
            ready = own.ready[key] = _make_ready(own, problem, sizes, device, capturing)
        # The workspace lives until the launch is made: what is allocated after it may lie where it does.
        shared, _workspace = calls.shared_by_launches(ready, problem, sizes, device, stream, capturing)
        write(ready.launcher.buffer, tensors, sizes, *shared)
        ready.launcher.start(stream)

    def repeat(tensors: Tensors, sizes: Sizes, own_output: bool) -> Repeat | None:
        ready = own.ready.get(_key(sizes, most))
        if ready is None or problem.split_keys:
            return None
        return calls.repeat_of(problem, ready, tensors, sizes, index, run, own_output, calls.OWN_PLACES)

    return Repeatable(run, repeat)


class _OfThread(threading.local):
    """Launchers have a buffer that is read during the launch, so each thread has its own."""

    def __init__(self) -> None:
        self.ready: dict[tuple[int, int, range], calls.Ready] = {}
        """By `_key`."""
        self.launchers: dict[DecodeConfiguration, Launcher] = {}


def _key(sizes: Sizes, multiprocessors: int) -> tuple[int, int, range]:
    """What the configuration of a problem's calls depends on."""
    return sizes.max_seqlen_q, min(sizes.batch, multiprocessors), configs.lengths_like(sizes.max_seqlen_k)


def _make_ready(
    own: _OfThread, problem: Problem, sizes: Sizes, device: Device, capturing: bool
) -> calls.Ready:
    configuration = configuration_for(problem, sizes, device)
    launcher = own.launchers.get(configuration)
    if launcher is None:
        launcher = own.launchers[configuration] = _make_launcher(configuration, problem, device, capturing)
    return calls.Ready(configuration, launcher, decode_arrival_pool(device.index), {})


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
    team = configs.team_for(problem.num_kv_heads, grid)
    grid -= grid % math.lcm(configuration.cluster, team)
    launcher = Launcher(
        function, (grid, 1, 1), compiled, calls.ARGUMENT_BYTES, dependent=configuration.dependent
    )
    calls.write_plan(launcher.buffer, problem, grid, team)
    return launcher
