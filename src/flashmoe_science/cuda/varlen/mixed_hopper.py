"""The Hopper kernel for prompts beside decode steps: one launch, in which there are blocks of two kinds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashmoe_science.configs.attention import decode as decode_configs
from flashmoe_science.configs.attention import decode_hopper as few_configs
from flashmoe_science.configs.attention import mixed_hopper as configs
from flashmoe_science.configs.attention.hopper_varlen import HopperFeatures
from flashmoe_science.configs.attention.mixed_hopper import MixedHopperConfiguration
from flashmoe_science.cuda import wgmma
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.driver import load
from flashmoe_science.cuda.launch import Launcher
from flashmoe_science.cuda.repeat import raw_stream
from flashmoe_science.cuda.tickets import decode_arrival_pool, is_capturing
from flashmoe_science.cuda.varlen import decode_calls, decode_hopper, hopper
from flashmoe_science.cuda.varlen.decode_workspace import arrival_counters
from flashmoe_science.cuda.varlen.key_maps import KeyMaps
from flashmoe_science.cuda.varlen.kind import VarlenKernel
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.varlen.problem import Problem, Run, Sizes, Tensors

_SHORTER = 4
"""Prompts are taken to be beside decode steps where the longest has so many times the average number of queries."""
_LARGE_DIM = 128
_CAPPED_ROWS = 64
_FEWEST_ROWS = 16
_BUILT_AHEAD_PAGE = 16
MAPS_AT = hopper.ARGUMENT_BYTES
FEW_AT = MAPS_AT + decode_hopper.MAPS_BYTES
ARGUMENT_BYTES = -(-(FEW_AT + decode_calls.ARGUMENT_BYTES) // 64) * 64


def why_not(problem: Problem, device: Device, most_queries: int) -> str | None:
    """See `select.KernelModule`."""
    reason = hopper.why_not(problem, device, most_queries)
    if reason is not None:
        return reason
    if problem.tree:
        return "it has no trees"
    if 0 < hopper.features(problem).page_rows < _FEWEST_ROWS:
        return f"pages of {problem.page_size} are no multiple of {_FEWEST_ROWS}"
    if problem.split_keys:
        return "it does not split keys at multiples of a number"
    if problem.head_dim != problem.value_dim or problem.head_dim not in few_configs.DIMENSIONS:
        return f"head_dim and value_dim are both {few_configs.DIMENSIONS[0]} or {few_configs.DIMENSIONS[1]}"
    group = problem.num_heads // problem.num_kv_heads
    if group > few_configs.PRODUCT_ROWS:
        return f"up to {few_configs.PRODUCT_ROWS} query heads share keys"
    if (
        problem.softcap
        and problem.head_dim == _LARGE_DIM
        and 0 < hopper.features(problem).page_rows < _CAPPED_ROWS
    ):
        return f"with a soft cap at head dim {_LARGE_DIM} pages are of multiples of {_CAPPED_ROWS}"  # it would spill
    return decode_calls.why_not_rows(problem, 1, few_configs.PRODUCT_ROWS)


def is_faster(problem: Problem, sizes: Sizes, tokens: int) -> bool:
    """Whether it is faster than the kernel for prompts, as far as sizes tell: most sequences are far shorter than one.

    With prompts alone it takes 1.00 to 1.02 of that one's time, beside decode steps 0.86 to 0.96; at head dim 64, where
    that one has taller tiles too, it was not timed.

    Args:
        tokens: query rows of all sequences.
    """
    return (
        problem.head_dim == _LARGE_DIM
        and sizes.max_seqlen_q > decode_calls.MOST_QUERIES
        and _SHORTER * tokens <= sizes.batch * sizes.max_seqlen_q
    )


def configuration_for(problem: Problem) -> MixedHopperConfiguration:
    group = problem.num_heads // problem.num_kv_heads
    return configs.configuration(problem.head_dim, problem.value_dim, group, hopper.features(problem))


def choose(problem: Problem, device: Device, sizes: Sizes, tokens: int) -> Choice:
    """See `select.KernelModule`."""
    return Choice(
        VarlenKernel.MIXED_HOPPER, configuration_for(problem), "prompts and decode steps side by side"
    )


def kernel(configuration: MixedHopperConfiguration, dtype: torch.dtype) -> CudaKernel:
    prompts = hopper.kernel(configuration.prompts, dtype)
    few = decode_hopper.kernel(configuration.few, dtype)
    own = {"MIXED": configuration.few.rows}
    of_few = {name: value for name, value in few.macros.items() if name != "DEPENDENT"}
    return CudaKernel(
        source="attention_mixed_hopper.cu",
        function="attention_mixed_hopper",
        architecture="sm_90a",
        macros={**prompts.macros, **of_few, **own},
        threads_per_block=configuration.threads,
        dynamic_shared_bytes=configuration.shared_bytes,
    )


def kernels(architecture: str) -> list[CudaKernel]:
    """What is built ahead of time: four query heads for each of the keys, causal, bfloat16, pages of 16."""
    if not wgmma.built_for(architecture):
        return []
    features = HopperFeatures(True, page_rows=_BUILT_AHEAD_PAGE)
    return [kernel(configs.configuration(_LARGE_DIM, _LARGE_DIM, 4, features), torch.bfloat16)]


def prepare(problem: Problem, device: Device, most_queries: int) -> Run:
    """See `flashmoe_science.varlen.problem.Backend`; the device is current. For problems that `why_not` is None for.

    Raises:
        InputError: a tensor does not begin at a multiple of 16 bytes, or there are more rows than the kernel counts;
            both in the run.
        BuildError, KernelDefectError, DeviceError: see `driver.load`.
    """
    configuration, index = configuration_for(problem), device.index
    compiled = kernel(configuration, problem.dtype)
    load(compiled, index, is_capturing())
    own, grid = _OfThread(), device.multiprocessors
    arrivals = decode_arrival_pool(index)
    ticket_at = 4 * arrival_counters(grid, configuration.few)
    write_few = decode_calls.call_writer(problem)

    def make_launch() -> _Launch:
        launcher = Launcher(load(compiled, index, is_capturing()), (grid, 1, 1), compiled, ARGUMENT_BYTES)
        describe = write_plan(launcher.buffer, problem, configuration, grid)
        ready = decode_calls.Ready(configuration.few, launcher, arrivals, {})
        return _Launch(ready, decode_hopper.arguments_of(launcher.buffer, FEW_AT), describe)

    def run(tensors: Tensors, sizes: Sizes) -> None:
        stream = raw_stream(index)
        capturing = stream != 0 and is_capturing()
        launch = own.launch
        if launch is None:
            launch = own.launch = make_launch()
        hopper.check_rows(problem, configuration.prompts, tensors, sizes)
        launch.describe(tensors)
        # The workspace lives until the launch is made: what is allocated after it may lie where it does.
        shared, _workspace = decode_calls.shared_by_launches(
            launch.ready, problem, sizes, device, stream, capturing, more_counters=1
        )
        ticket = shared[1] + ticket_at
        launcher = launch.ready.launcher
        hopper.write_call(launcher.buffer, tensors, sizes, ticket)
        write_few(launch.few, tensors, sizes, *shared)
        launcher.start(stream)

    return run


class _Launch(NamedTuple):
    ready: decode_calls.Ready
    few: Any
    """The `Parameters` of decode steps in the launcher's buffer."""
    describe: Callable[[Tensors], None]


class _OfThread(threading.local):
    """Launchers have a buffer that is read during the launch, so each thread has its own."""

    def __init__(self) -> None:
        self.launch: _Launch | None = None


def write_plan(
    buffer: Any, problem: Problem, configuration: MixedHopperConfiguration, grid: int
) -> Callable[[Tensors], None]:
    """What is the same in all calls of a problem; and what describes a call's tensors to TMA."""
    team = decode_configs.team_for(problem.num_kv_heads, grid)
    team = team if grid >= 2 * team else 1  # blocks are left for prompts
    few = configuration.few
    hopper.write_plan(buffer, problem, configuration.prompts)
    decode_calls.write_plan(decode_hopper.arguments_of(buffer, FEW_AT), problem, grid, team, few.tile_keys)
    of_prompts = hopper.TensorMaps(buffer, problem, configuration.prompts)
    of_few = KeyMaps(buffer, MAPS_AT, problem, few.box_rows, read_once=True)

    def describe(tensors: Tensors) -> None:
        of_prompts.describe(tensors)
        of_few.describe(tensors)

    return describe
