"""The portable way through a mixture of experts for many tokens (`kernels/cuda/moe_portable.cu`), sm_80 and later:
configurations and launches.
"""

from __future__ import annotations

import math
import struct
from enum import Enum
from typing import Any

import torch

from flashmoe_science.configs.moe import portable as configs
from flashmoe_science.configs.moe.portable import PortableMoeConfiguration, ProductTile
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.launch import LaunchPlan, loaded, type_macros
from flashmoe_science.cuda.moe import combine, routing
from flashmoe_science.cuda.moe.combine import Combine
from flashmoe_science.cuda.moe.problem import MoeKind, MoeProblem, addresses_of_biases
from flashmoe_science.cuda.moe.routing import Routing
from flashmoe_science.cuda.moe.workspace import sorted_workspace
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import overlaps
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.moe_arguments import ACTIVATION_CODES, Activation, W13Layout

POINTERS = struct.Struct("7Q")  # input, weights, output, expert_offsets, sorted_slots, ticket, bias
_REST = struct.Struct("3q8i")
ARGUMENT_BYTES = POINTERS.size + _REST.size
_MOST_TILES = 1 << 31
_TICKET_BYTES = 4
_DTYPES = (torch.bfloat16, torch.float16)


class Product(Enum):
    """The two products of an expert."""

    UP = "up"
    """Rows gathered by token, times w13, activated; output in sorted order."""
    DOWN = "down"
    """Rows in sorted order, times w2; output by slot."""


def choose(problem: MoeProblem, device: Device) -> Choice | None:
    """The tiles for the mean number of rows per expert."""
    if why_not(problem, device) is not None:
        return None
    configuration = configs.configuration(device.architecture, problem.rows_per_expert)
    return Choice(
        MoeKind.PORTABLE,
        configuration,
        f"mma.sync products with the tiles for {problem.rows_per_expert:.0f} rows per expert",
    )


def why_not(problem: MoeProblem, device: Device) -> str | None:
    if problem.keeps:
        return "it keeps nothing for a backward pass"
    if device.architecture not in configs.tuned_architectures():
        return f"there are no tiles for {device.architecture}"
    if not _countable(problem, configs.configuration(device.architecture, problem.rows_per_expert)):
        return "it cannot count so many tiles, or rows so long"
    most = routing.most_experts(device.architecture)
    if problem.experts > most:
        return f"routing counts at most {most} experts"
    return None


def kernels(architecture: str) -> list[CudaKernel]:
    """Both products of every configuration, for all activations and types; none before sm_80."""
    built = [
        kernel(tile, product, activation, dtype, architecture)
        for configuration in configs.all_configurations(architecture)
        for dtype in _DTYPES
        for tile, product, activations in (
            (configuration.up, Product.UP, tuple(Activation)),
            (configuration.down, Product.DOWN, (Activation.SILU,)),
        )
        for activation in activations
    ]
    if not built:
        return []
    each_once = {one.label: one for one in built}
    return [*each_once.values(), *routing.step_kernels(architecture), *combine.step_kernels(architecture)]


def check(problem: MoeProblem, configuration: Any) -> None:
    if not isinstance(configuration, PortableMoeConfiguration):
        raise InputError(f"the portable products take a PortableMoeConfiguration, not {configuration!r}")
    if not _countable(problem, configuration):
        raise InputError(
            f"{problem.tokens} tokens of {problem.hidden} with {problem.top_k} experts each are more than the "
            "portable products can count; split the tokens"
        )


def kernel(
    tile: ProductTile, product: Product, activation: Activation, dtype: torch.dtype, architecture: str
) -> CudaKernel:
    """One product in one tile shape, which may be another architecture's."""
    up = product is Product.UP
    return CudaKernel(
        source="moe_portable.cu",
        function="moe_portable",
        architecture=architecture,
        macros={
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "STAGES": tile.stages,
            "WARPS_M": tile.warps_m,
            "WARPS_N": tile.warps_n,
            "MIN_BLOCKS": tile.blocks,
            "UP": int(up),
            "ACTIVATION": ACTIVATION_CODES[activation] if up else 0,
            "DEPENDENT": int(overlaps(architecture)),
            **type_macros(dtype),
        },
        threads_per_block=tile.threads,
        dynamic_shared_bytes=tile.shared_bytes(gather=up),
    )


class ProductLaunch:
    """The launch of one product, of which only addresses are missing."""

    __slots__ = ("_launcher",)

    def __init__(
        self,
        problem: MoeProblem,
        product: Product,
        tile: ProductTile,
        device: Device,
        *,
        allow_defects: bool = False,
    ) -> None:
        """The device is current."""
        compiled = kernel(tile, product, problem.activation, problem.dtype, device.architecture)
        self._launcher = loaded(
            compiled,
            device,
            (grid(problem, product, tile, device), 1, 1),
            ARGUMENT_BYTES,
            dependent=bool(compiled.macros["DEPENDENT"]),
            allow_defects=allow_defects,
        )
        write_fields(self._launcher.buffer, problem, product, tile, device)

    def launch(
        self,
        input_rows: int,
        weights: int,
        output: int,
        expert_offsets: int,
        sorted_slots: int,
        ticket: int,
        bias: int,
        stream: int,
    ) -> None:
        """`ticket`: of an int32 that is zero when the kernel starts; `bias`: of the weights' rows, or 0."""
        POINTERS.pack_into(
            self._launcher.buffer, 0, input_rows, weights, output, expert_offsets, sorted_slots, ticket, bias
        )
        self._launcher.start(stream)


def plan(
    problem: MoeProblem, configuration: Any, device: Device, *, allow_defects: bool = False
) -> LaunchPlan:
    check(problem, configuration)
    tiles: PortableMoeConfiguration = configuration
    sort = Routing(problem, device, device.architecture)
    up = ProductLaunch(problem, Product.UP, tiles.up, device, allow_defects=allow_defects)
    down = ProductLaunch(problem, Product.DOWN, tiles.down, device, allow_defects=allow_defects)
    join = Combine(problem, device, device.architecture)
    with_biases = addresses_of_biases(problem)
    _, offsets_at, slots_at, counts_at, inner_at, rows_at, total = sorted_workspace(problem, sort)

    def launch(
        hidden: int,
        w13: int,
        w2: int,
        topk_weights: int,
        topk_ids: int,
        *rest: int,
    ) -> None:
        w13_bias, w2_bias, output, workspace, stream = with_biases(rest) if with_biases else (0, 0, *rest)
        offsets, slots = workspace + offsets_at, workspace + slots_at
        inner, rows = workspace + inner_at, workspace + rows_at
        sort.launch(topk_ids, offsets, slots, workspace + counts_at, workspace, stream)
        up.launch(hidden, w13, inner, offsets, slots, workspace, w13_bias, stream)
        down.launch(inner, w2, rows, offsets, slots, workspace + _TICKET_BYTES, w2_bias, stream)
        join.launch(rows, topk_weights, topk_ids, output, stream)

    return LaunchPlan(launch, total)


def grid(problem: MoeProblem, product: Product, tile: ProductTile, device: Device) -> int:
    """Blocks: as many as run at a time, or as there can be tiles."""
    return min(device.multiprocessors * tile.blocks, _most_tiles(problem, product, tile))


def write_fields(
    buffer: Any, problem: MoeProblem, product: Product, tile: ProductTile, device: Device
) -> None:
    """What a launch passes after the addresses, into its argument."""
    _REST.pack_into(buffer, POINTERS.size, *fields(problem, product, tile, device))


def fields(problem: MoeProblem, product: Product, tile: ProductTile, device: Device) -> tuple[int, ...]:
    """What a launch passes after the addresses."""
    parts, inner, columns = _shape(problem, product)
    row = inner * problem.dtype.itemsize
    interleaved = parts == 2 and problem.w13_layout is W13Layout.INTERLEAVED
    # Where as many rows of input as of weights are worked on at a time, the least is read.
    running = grid(problem, product, tile, device)
    section = max(1, round(math.sqrt(running * tile.block_n / tile.block_m)))
    return (
        parts * columns * row,
        2 * row if interleaved else row,
        row if interleaved else columns * row,
        problem.experts,
        problem.top_k,
        inner,
        columns,
        _column_tiles(problem, product, tile),
        section,
        *(problem.w13_bias_strides if product is Product.UP else (1, 0)),
    )


def _countable(problem: MoeProblem, configuration: PortableMoeConfiguration) -> bool:
    """Whether 32 bits hold the tiles, and the 16-byte chunks of the rows that are gathered."""
    return (
        problem.tokens * problem.hidden // 8 < 1 << 32
        and _most_tiles(problem, Product.UP, configuration.up) < _MOST_TILES
        and _most_tiles(problem, Product.DOWN, configuration.down) < _MOST_TILES
    )


def _shape(problem: MoeProblem, product: Product) -> tuple[int, int, int]:
    """Rows of weights per output column, inner size, output columns."""
    if product is Product.UP:
        return 2 if problem.gated else 1, problem.hidden, problem.intermediate
    return 1, problem.intermediate, problem.hidden


def _column_tiles(problem: MoeProblem, product: Product, tile: ProductTile) -> int:
    parts, _, columns = _shape(problem, product)
    return -(-columns * parts // tile.block_n)


def _most_tiles(problem: MoeProblem, product: Product, tile: ProductTile) -> int:
    """Whatever the routing: each expert with rows has at most one tile that is not full."""
    row_tiles = problem.slots // tile.block_m + min(problem.experts, problem.slots)
    return row_tiles * _column_tiles(problem, product, tile)
