"""The way through a mixture of experts for few tokens (`kernels/cuda/moe_few_*.cu`), sm_80 and later: configurations
and launches.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from flashmoe_science.configs import moe_few as configs
from flashmoe_science.configs.moe_few import FewConfiguration, FewProduct, FewWay
from flashmoe_science.cuda.driver import ADDRESSES, Launcher, load
from flashmoe_science.cuda.moe.problem import MoeLaunch, MoeProblem
from flashmoe_science.cuda.problem import Device
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import limits
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.moe_arguments import Activation, W13Layout

_PRODUCT = struct.Struct("=Q4I9i4x")
"""The fields of the kernels' `Parameters` after the addresses."""
_COMBINE = struct.Struct("=4i")
PRODUCT_BYTES = ADDRESSES.size + _PRODUCT.size
COMBINE_BYTES = ADDRESSES.size + _COMBINE.size
_COMBINE_THREADS = 128
_CHUNK_ELEMENTS = 8
_DTYPES = (torch.bfloat16, torch.float16)
_ACTIVATIONS = {
    Activation.SILU: 1,
    Activation.GELU: 2,
    Activation.GELU_TANH: 3,
    Activation.SILU_NO_MUL: 4,
    Activation.GELU_NO_MUL: 5,
    Activation.RELU2_NO_MUL: 6,
}


class Product(Enum):
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True)
class FewPlan:
    workspace_bytes: int
    launch: MoeLaunch


def product_kernel(
    configuration: FewConfiguration,
    product: Product,
    activation: Activation,
    dtype: torch.dtype,
    ids64: bool,
    architecture: str,
) -> CudaKernel:
    """One product in one configuration, which may be another architecture's."""
    up = product is Product.UP
    tile = _tile(configuration, product)
    name = f"moe_few_{tile.way.value}"
    own = {"PARTS": tile.parts} if tile.way is FewWay.COMBINED else {"SECOND": int(not up)}
    return CudaKernel(
        source=f"{name}.cu",
        function=name,
        architecture=architecture,
        macros={
            "WARPS": tile.warps,
            "M_TILES": tile.m_tiles,
            "N_TILES": tile.n_tiles,
            "K_STEPS": tile.k_steps,
            "STAGES": tile.stages,
            "MAX_SLOTS": configuration.max_slots,
            "DIRECT": int(configuration.direct),
            "ACTIVATION": _ACTIVATIONS[activation] if up else 0,
            **own,
            **_common_macros(dtype, ids64, architecture),
        },
        threads_per_block=tile.threads,
        dynamic_shared_bytes=configuration.shared_bytes(tile),
    )


def combine_kernel(dtype: torch.dtype, ids64: bool, architecture: str) -> CudaKernel:
    return CudaKernel(
        source="moe_few_combine.cu",
        function="moe_few_combine",
        architecture=architecture,
        macros=_common_macros(dtype, ids64, architecture),
        threads_per_block=_COMBINE_THREADS,
        dynamic_shared_bytes=0,
    )


def _common_macros(dtype: torch.dtype, ids64: bool, architecture: str) -> dict[str, int]:
    return {
        "DEPENDENT": int(limits(architecture).dependent_launch),
        "IDS64": int(ids64),
        "ELEMENT_BF16": int(dtype == torch.bfloat16),
        "NATIVE_CP_ASYNC": 1,
        "MMA_K": 16,
    }


def check(problem: MoeProblem, configuration: Any) -> None:
    if not isinstance(configuration, FewConfiguration):
        raise InputError(f"the way for few tokens takes a FewConfiguration, not {configuration!r}")
    most = min(configuration.max_slots, configs.DIRECT_SLOTS if configuration.direct else configs.MAX_SLOTS)
    if problem.slots > most or problem.experts > configs.MAX_EXPERTS:
        raise InputError(
            f"tokens * k is {problem.slots} with {problem.experts} experts; expected at most {most} with "
            f"{configs.MAX_EXPERTS} for ({configuration.label}): choose again"
        )


def plan(problem: MoeProblem, configuration: Any, device: Device, *, allow_defects: bool = False) -> FewPlan:
    check(problem, configuration)
    up = product_launcher(problem, configuration, Product.UP, device, allow_defects=allow_defects).start_at
    down = product_launcher(
        problem, configuration, Product.DOWN, device, allow_defects=allow_defects
    ).start_at
    intermediate_bytes = _aligned(problem.slots * problem.intermediate * problem.dtype.itemsize)
    if configuration.combined:

        def launch_combined(
            x: int, w13: int, w2: int, weights: int, ids: int, output: int, workspace: int, stream: int
        ) -> None:
            up(x, w13, weights, ids, workspace, stream)
            down(workspace, w2, weights, ids, output, stream)

        return FewPlan(intermediate_bytes, launch_combined)

    combine = combine_launcher(problem, device, allow_defects=allow_defects).start_at

    def launch_by_slots(
        x: int, w13: int, w2: int, weights: int, ids: int, output: int, workspace: int, stream: int
    ) -> None:
        rows = workspace + intermediate_bytes
        up(x, w13, weights, ids, workspace, stream)
        down(workspace, w2, weights, ids, rows, stream)
        combine(rows, weights, ids, output, 0, stream)

    rows_bytes = problem.slots * problem.hidden * problem.dtype.itemsize
    return FewPlan(intermediate_bytes + rows_bytes, launch_by_slots)


def product_launcher(
    problem: MoeProblem,
    configuration: FewConfiguration,
    product: Product,
    device: Device,
    *,
    allow_defects: bool = False,
) -> Launcher:
    """One product, ready: `start_at(input, weights, topk_weights, topk_ids, output, stream)`."""
    kernel = product_kernel(
        configuration, product, problem.activation, problem.dtype, problem.ids64, device.architecture
    )
    capturing = torch.cuda.is_current_stream_capturing()
    function = load(kernel, device.index, capturing, allow_defects=allow_defects)
    grid = (blocks(problem, configuration, product, device), 1, 1)
    dependent = bool(kernel.macros["DEPENDENT"])
    launcher = Launcher(function, grid, kernel, PRODUCT_BYTES, dependent=dependent)
    write_product(launcher.buffer, problem, configuration, product)
    return launcher


def combine_launcher(problem: MoeProblem, device: Device, *, allow_defects: bool = False) -> Launcher:
    """The combination, ready: `start_at(rows, topk_weights, topk_ids, output, 0, stream)`."""
    kernel = combine_kernel(problem.dtype, problem.ids64, device.architecture)
    capturing = torch.cuda.is_current_stream_capturing()
    function = load(kernel, device.index, capturing, allow_defects=allow_defects)
    chunks = problem.tokens * problem.hidden // _CHUNK_ELEMENTS
    grid = (-(-chunks // _COMBINE_THREADS), 1, 1)
    dependent = bool(kernel.macros["DEPENDENT"])
    launcher = Launcher(function, grid, kernel, COMBINE_BYTES, dependent=dependent)
    write_combine(launcher.buffer, problem)
    return launcher


def blocks(problem: MoeProblem, configuration: FewConfiguration, product: Product, device: Device) -> int:
    """One on every multiprocessor, or as many as there can be units of work."""
    slabs = _slabs(problem, configuration, product)
    if _tile(configuration, product).way is FewWay.COMBINED:
        return min(device.multiprocessors, slabs)
    return min(device.multiprocessors, slabs * problem.slots)


def write_product(
    buffer: Any, problem: MoeProblem, configuration: FewConfiguration, product: Product
) -> None:
    """All fields of a product's `Parameters` but the addresses."""
    up = product is Product.UP
    inner, outer = (problem.hidden, problem.intermediate) if up else (problem.intermediate, problem.hidden)
    row = inner * problem.dtype.itemsize
    if not (up and problem.gated):
        tile_rows, lane_rows, high_rows = 16, 1, 8
    elif problem.w13_layout is W13Layout.INTERLEAVED:
        tile_rows, lane_rows, high_rows = 16, 2, 1
    else:
        tile_rows, lane_rows, high_rows = 8, 1, problem.intermediate
    _PRODUCT.pack_into(
        buffer,
        ADDRESSES.size,
        (problem.w13_rows if up else problem.hidden) * row,
        tile_rows * row,
        lane_rows * row,
        high_rows * row,
        row,
        problem.slots,
        problem.tokens,
        problem.top_k,
        problem.experts,
        inner,
        outer,
        _tiles(problem, product),
        _slabs(problem, configuration, product),
        problem.top_k if up else 1,
    )


def write_combine(buffer: Any, problem: MoeProblem) -> None:
    """All fields of `CombineParameters` but the addresses."""
    row_chunks = problem.hidden // _CHUNK_ELEMENTS
    _COMBINE.pack_into(
        buffer, ADDRESSES.size, problem.tokens * row_chunks, row_chunks, problem.top_k, problem.experts
    )


def _tiles(problem: MoeProblem, product: Product) -> int:
    if product is Product.DOWN:
        return problem.hidden // 16
    return problem.intermediate // (8 if problem.gated else 16)


def _slabs(problem: MoeProblem, configuration: FewConfiguration, product: Product) -> int:
    return -(-_tiles(problem, product) // _tile(configuration, product).unit_tiles)


def _tile(configuration: FewConfiguration, product: Product) -> FewProduct:
    return configuration.up if product is Product.UP else configuration.down


def _aligned(size: int) -> int:
    return -(-size // 256) * 256
