"""The Hopper kernel for decode steps (`kernels/cuda/attention_decode_hopper.cu`): TMA and wgmma, lengths on the device.

It has the schedule of the other decode kernel, and what calls of both share (`decode_calls`) behind two tensor maps.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from flashmoe_science.configs.attention import decode as decode_configs
from flashmoe_science.configs.attention import decode_hopper as configs
from flashmoe_science.configs.attention.decode_hopper import DecodeHopperConfiguration
from flashmoe_science.cuda import wgmma
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.driver import load
from flashmoe_science.cuda.launch import Launcher, clusters_at_once
from flashmoe_science.cuda.repeat import raw_stream
from flashmoe_science.cuda.tensor_map import MAP_BYTES, address_offset
from flashmoe_science.cuda.tickets import decode_arrival_pool, is_capturing
from flashmoe_science.cuda.varlen import decode_calls, hopper
from flashmoe_science.cuda.varlen.key_maps import KeyMaps
from flashmoe_science.cuda.varlen.kind import VarlenKernel, most_keys_seen, packed_rows
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.varlen.problem import Problem, Repeat, Repeatable, Run, Sizes, Tensors

MAPS_BYTES = 2 * MAP_BYTES
_FEW_ROWS = 8
"""Packed rows up to which the other kernel's clusters of two are faster over short keys, and it over the shortest."""
_BUILT_AHEAD = 128
"""Head dimension."""
_SMALL_DIM = 64
_FEW_ROWS_OF_SMALL_DIM = 16
"""Up to which it is faster throughout at that dim."""
ARGUMENT_BYTES = -(-(MAPS_BYTES + decode_calls.ARGUMENT_BYTES) // 64) * 64


def why_not(problem: Problem, device: Device, most_queries: int) -> str | None:
    """See `select.KernelModule`."""
    reason = wgmma.why_not_device(device) or decode_calls.why_not_rows(
        problem, most_queries, configs.PRODUCT_ROWS
    )
    if reason is not None:
        return reason
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"it does not take {problem.dtype}"
    for asked, words in (
        (problem.quantized is not None, "it reads no cache of FP8"),
        (problem.alibi, "it has no ALiBi"),
        (problem.tree, "it has no trees"),
    ):
        if asked:
            return words
    if problem.head_dim not in configs.DIMENSIONS or problem.value_dim not in configs.DIMENSIONS:
        return f"head_dim and value_dim are {configs.DIMENSIONS[0]} or {configs.DIMENSIONS[1]}"
    by_tma = configs.box_rows(problem.page_size) > 1
    return hopper.why_not_strides(problem) if by_tma else hopper.why_not_alignment(problem)


def is_faster(problem: Problem, sizes: Sizes, device: Device) -> bool:
    """Whether it is the faster one of the two kernels for few queries; False for calls that neither takes.

    This one takes hardly longer for 64 rows than for one, and reads long caches a little faster. The other one has
    clusters of more blocks, and less to do before its first key.
    """
    if sizes.max_seqlen_q > decode_calls.MOST_QUERIES or wgmma.why_not_device(device) is not None:
        return False
    is_small = max(problem.head_dim, problem.value_dim) <= _SMALL_DIM
    if problem.split_keys:  # with which bits, and so the kernel, depend on nothing else in the batch
        return not is_small
    multiprocessors = device.multiprocessors
    sets = sizes.batch * problem.num_kv_heads
    rows, most_keys = packed_rows(problem, sizes), most_keys_seen(problem, sizes)
    has_clusters = most_keys <= decode_configs.SHORT and 2 * sets <= multiprocessors
    if has_clusters and (is_small or 4 * sets <= multiprocessors):
        return False
    if is_small:
        return rows > _FEW_ROWS_OF_SMALL_DIM
    return rows > _FEW_ROWS or not (has_clusters or most_keys <= decode_configs.FEW)


def configuration_for(problem: Problem, sizes: Sizes, device: Device) -> DecodeHopperConfiguration:
    rows = packed_rows(problem, sizes)
    sets, multiprocessors = sizes.batch * problem.num_kv_heads, device.multiprocessors
    cuts_anywhere = not problem.split_keys
    chosen = configs.configuration(
        problem.head_dim,
        problem.value_dim,
        rows,
        problem.page_size,
        softcap=problem.softcap > 0,
        chunk=problem.chunk > 0,
        parts=configs.parts_for(sets, rows, multiprocessors) if cuts_anywhere else 1,
        together=cuts_anywhere and configs.finish_together(sets, rows, multiprocessors),
    )
    return replace(chosen, only=problem.only)


def choose(problem: Problem, device: Device, sizes: Sizes, tokens: int) -> Choice:
    """See `select.KernelModule`."""
    configuration = configuration_for(problem, sizes, device)
    keys = "keys copied row by row" if configuration.gathered else "keys by TMA"
    return Choice(
        VarlenKernel.DECODE_HOPPER, configuration, f"few queries: {keys}, wgmma for all rows at once"
    )


def kernel(configuration: DecodeHopperConfiguration, dtype: torch.dtype) -> CudaKernel:
    return CudaKernel(
        source="attention_decode_hopper.cu",
        function="attention_decode_hopper",
        architecture="sm_90a",
        macros={
            "HEAD_DIM": configuration.head_dim,
            "VALUE_DIM": configuration.value_dim,
            "ROW_TILES": configuration.row_tiles,
            "STAGES": configuration.stages,
            "PAGES": 2 if configuration.gathered else int(configuration.paged),
            "BOX_ROWS": configuration.box_rows,
            "SCORE_CHANGES": int(configuration.softcap),
            **({"CHUNK": 1} if configuration.chunk else {}),
            **({"PARTS": configuration.parts} if configuration.parts > 1 else {}),
            **({"TOGETHER": 1} if configuration.together else {}),
            **({"ONLY": configuration.only} if configuration.only else {}),
            "DEPENDENT": 1,
            "QUERY_BF16": int(dtype == torch.bfloat16),
            "ELEMENT_BF16": int(dtype == torch.bfloat16),
            "MMA_K": 16,
            "NATIVE_FP8": 1,
            "NATIVE_CP_ASYNC": 1,
            "NATIVE_REDUX": 1,
        },
        threads_per_block=configuration.threads,
        dynamic_shared_bytes=configuration.shared_bytes,
        cluster_blocks=configuration.parts,
    )


def kernels(architecture: str) -> list[CudaKernel]:
    """What is built ahead of time: one token of many sequences, bfloat16, pages of 16 and 64."""
    if not wgmma.built_for(architecture):
        return []
    return [
        kernel(configs.configuration(_BUILT_AHEAD, _BUILT_AHEAD, rows=8, page_size=page), torch.bfloat16)
        for page in (16, 64)
    ]


def prepare(problem: Problem, device: Device, most_queries: int) -> Run:
    """See `flashmoe_science.varlen.problem.Backend`; the device is current. For problems that `why_not` is None for.

    Raises:
        InputError: a tensor does not begin at a multiple of 16 bytes; in the run.
        BuildError, KernelDefectError, DeviceError: see `driver.load`. A kernel that is first asked for in the run may
            have defects.
    """
    own, index = _OfThread(), device.index
    # The fewest queries of the bucket stand for all: where the compiler spills, another kernel is to take the calls.
    usual = kernel(configuration_for(problem, Sizes(1, (most_queries + 1) // 2, 1), device), problem.dtype)
    if not is_capturing():
        load(usual, index, False)
    write = decode_calls.call_writer(problem)

    def key_of(sizes: Sizes) -> tuple[int, int]:
        """What the configuration of a problem's calls depends on."""
        return sizes.max_seqlen_q, min(sizes.batch, device.multiprocessors)

    def run(tensors: Tensors, sizes: Sizes) -> None:
        stream = raw_stream(index)
        capturing = stream != 0 and is_capturing()
        key = key_of(sizes)
        launch = own.launches.get(key)
        if launch is None:
            launch = own.launches[key] = _make_launch(
                own, problem, configuration_for(problem, sizes, device), device, capturing
            )
        # The workspace lives until the launch is made: what is allocated after it may lie where it does.
        shared, _workspace = decode_calls.shared_by_launches(
            launch.ready, problem, sizes, device, stream, capturing
        )
        write(launch.arguments, tensors, sizes, *shared)
        if launch.maps is not None:
            launch.maps.describe(tensors)
        launch.ready.launcher.start(stream)

    def repeat(tensors: Tensors, sizes: Sizes, own_output: bool) -> Repeat | None:
        launch = own.launches.get(key_of(sizes))
        if launch is None or problem.split_keys:
            return None
        places = _places(launch, tensors)
        if places is None:
            return None
        return decode_calls.repeat_of(problem, launch.ready, tensors, sizes, index, run, own_output, places)

    return Repeatable(run, repeat)


class _Launch(NamedTuple):
    ready: decode_calls.Ready
    arguments: Any
    """The kernel's `Parameters` in the launcher's buffer, as `decode_calls` writes them."""
    maps: KeyMaps | None
    """None where keys are read by the parameters' addresses."""


class _OfThread(threading.local):
    """Launchers have a buffer that is read during the launch, so each thread has its own."""

    def __init__(self) -> None:
        self.launches: dict[tuple[int, int], _Launch] = {}
        """By `max_seqlen_q` and the batch."""
        self.of_configuration: dict[DecodeHopperConfiguration, _Launch] = {}


def _make_launch(
    own: _OfThread,
    problem: Problem,
    configuration: DecodeHopperConfiguration,
    device: Device,
    capturing: bool,
) -> _Launch:
    launch = own.of_configuration.get(configuration)
    if launch is not None:
        return launch
    compiled = kernel(configuration, problem.dtype)
    function = load(compiled, device.index, capturing, allow_defects=True)
    parts, workers = configuration.parts, device.multiprocessors
    if parts > 1:
        workers = min(clusters_at_once(function, compiled), workers // parts)
        if workers == 0:  # a part of a GPU may have no such cluster's room
            return _make_launch(own, problem, replace(configuration, parts=1), device, capturing)
    team = decode_configs.team_for(problem.num_kv_heads, workers)  # which divides them
    launcher = Launcher(function, (parts * workers, 1, 1), compiled, ARGUMENT_BYTES, dependent=True)
    arguments = arguments_of(launcher.buffer)
    decode_calls.write_plan(arguments, problem, workers, team, configs.TILE_KEYS)
    ready = decode_calls.Ready(configuration, launcher, decode_arrival_pool(device.index), {})
    maps = None
    if not configuration.gathered:
        maps = KeyMaps(launcher.buffer, 0, problem, configuration.box_rows, read_once=True)
    launch = own.of_configuration[configuration] = _Launch(ready, arguments, maps)
    return launch


def _places(launch: _Launch, tensors: Tensors) -> decode_calls.Places | None:
    """Where a launch's buffer has the addresses of such tensors; None where that is not known."""
    if launch.maps is None:
        key, value = (MAPS_BYTES + at for at in decode_calls.OWN_PLACES[1:])
        return decode_calls.Places(MAPS_BYTES, key, value)
    offset = address_offset()
    if offset is None:
        return None
    launch.maps.describe(tensors)
    if not launch.maps.have_addresses_at(offset):
        return None
    return decode_calls.Places(MAPS_BYTES, offset, MAP_BYTES + offset)


def arguments_of(buffer: Any, at: int = MAPS_BYTES) -> Any:
    """The kernel's `Parameters` in a launch's buffer, as `decode_calls` writes them."""
    return (ctypes.c_char * decode_calls.ARGUMENT_BYTES).from_buffer(buffer, at)
