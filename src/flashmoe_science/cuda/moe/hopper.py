"""Mixture of experts on Hopper for many tokens: routing, two grouped products (`moe_hopper.cu`), combination."""

from __future__ import annotations

import struct
from typing import Any

import torch

from flashmoe_science.configs.moe import hopper as configs
from flashmoe_science.configs.moe.hopper import MoeHopperConfiguration
from flashmoe_science.cuda import wgmma
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.launch import Launcher, LaunchPlan, loaded, type_macros
from flashmoe_science.cuda.moe import combine, routing
from flashmoe_science.cuda.moe.combine import Combine
from flashmoe_science.cuda.moe.problem import MoeKind, MoeProblem, addresses_of_biases
from flashmoe_science.cuda.moe.routing import Routing
from flashmoe_science.cuda.moe.workspace import sorted_workspace
from flashmoe_science.cuda.tensor_map import MAP_BYTES, TensorMap
from flashmoe_science.errors import InputError
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.moe_arguments import ACTIVATION_CODES, Activation, W13Layout

_ARCHITECTURE = "sm_90a"
_POINTERS = struct.Struct("7Q")  # tokens, output, expert_offsets, sorted_slots, ticket, kept, bias
_REST = struct.Struct("7i")
_POINTERS_AT = 2 * MAP_BYTES
_ARGUMENT_BYTES = -(-(_POINTERS_AT + _POINTERS.size + _REST.size) // 64) * 64
_MOST_TILES = 1 << 30


def choose(problem: MoeProblem, device: Device) -> Choice | None:
    """The tile for the mean number of rows of an expert, where the compiler is up to it."""
    if why_not(problem, device) is not None:
        return None
    tile = configuration(problem)
    reason = "TMA and wgmma products of rows sorted by expert"
    return Choice(
        MoeKind.HOPPER, tile, reason + (", pairs of blocks share weights" if tile.cluster > 1 else "")
    )


def configuration(problem: MoeProblem) -> MoeHopperConfiguration:
    """The usual tile."""
    return configs.configuration(problem.rows_per_expert, pairs=problem.keeps and problem.gated)


def why_not(problem: MoeProblem, device: Device) -> str | None:
    reason = wgmma.why_not_device(device)
    if reason is not None:
        return reason
    too_big = _what_is_too_big(problem)
    return None if too_big is None else f"it cannot count {too_big}"


def _what_is_too_big(problem: MoeProblem) -> str | None:
    """What the kernels could not count, if anything."""
    most = routing.most_experts(_ARCHITECTURE)
    if problem.experts > most:
        return f"{problem.experts} experts; expected at most {most}"
    width = min(tile.tokens for tile in configs.all_configurations())
    row_tiles = problem.slots // width + problem.experts
    tiles = row_tiles * max(_weight_tiles(problem.w13_rows), _weight_tiles(problem.hidden))
    if tiles > _MOST_TILES:
        return f"{tiles} tiles; expected at most {_MOST_TILES}: split the tokens"
    return None


def _weight_tiles(rows: int) -> int:
    return -(-rows // configs.WEIGHT_ROWS)


def kernels(architecture: str) -> list[CudaKernel]:
    if not wgmma.built_for(architecture):
        return []
    products = [
        kernel(tile, activation, dtype)
        for tile in configs.all_configurations()
        for activation in (*(() if tile.cluster > 1 else Activation), None)  # a pair's first product keeps
        for dtype in (torch.bfloat16, torch.float16)
    ]
    return [*products, *routing.step_kernels(_ARCHITECTURE), *combine.step_kernels(_ARCHITECTURE)]


def kernel(
    tile: MoeHopperConfiguration, activation: Activation | None, dtype: torch.dtype, *, keeps: bool = False
) -> CudaKernel:
    """The first product, with the activation after it; the second, without one. `keeps`: see `MoeProblem`."""
    return CudaKernel(
        source="moe_hopper.cu",
        function="moe_hopper",
        architecture=_ARCHITECTURE,
        macros={
            **tile.macros,
            "GATHER": int(activation is not None),
            "KEEP": int(keeps and activation is not None),
            "ACTIVATION": 0 if activation is None else ACTIVATION_CODES[activation],
            **type_macros(dtype),
        },
        threads_per_block=configs.THREADS,
        dynamic_shared_bytes=tile.shared_bytes,
        cluster_blocks=tile.cluster,
    )


def check(problem: MoeProblem, configuration: Any) -> None:
    if not isinstance(configuration, MoeHopperConfiguration):
        raise InputError(f"the Hopper kernels take a MoeHopperConfiguration, not {configuration!r}")
    reason = _what_is_too_big(problem)
    if reason is not None:
        raise InputError(f"the Hopper kernels cannot count {reason}")


class FirstProduct:
    """The launch of the first product, of which only addresses are missing."""

    __slots__ = ("_launcher", "_map")

    def __init__(
        self,
        problem: MoeProblem,
        tile: MoeHopperConfiguration,
        device: Device,
        *,
        allow_defects: bool = False,
    ) -> None:
        """The device is current."""
        compiled = kernel(tile, problem.activation, problem.dtype, keeps=problem.keeps)
        self._launcher = _launcher(
            problem, compiled, device, allow_defects, problem.hidden, problem.intermediate, problem.w13_rows
        )
        self._map = _first_weight_map(self._launcher, problem, tile)

    def launch(
        self,
        hidden: int,
        w13: int,
        activated: int,
        expert_offsets: int,
        sorted_slots: int,
        ticket: int,
        kept: int,
        bias: int,
        stream: int,
    ) -> None:
        """`kept`: where what is activated goes, (slots, w13_rows), gates first; only if the problem `keeps`.

        `bias`: of w13, or 0.
        """
        if self._map.address != w13:
            self._map.move(w13)
        _POINTERS.pack_into(
            self._launcher.buffer,
            _POINTERS_AT,
            hidden,
            activated,
            expert_offsets,
            sorted_slots,
            ticket,
            kept,
            bias,
        )
        self._launcher.start(stream)


def _launcher(
    problem: MoeProblem,
    compiled: CudaKernel,
    device: Device,
    allow_defects: bool,
    inner: int,
    columns: int,
    weight_rows: int | None = None,
) -> Launcher:
    blocks = device.multiprocessors // compiled.cluster_blocks * compiled.cluster_blocks
    launcher = loaded(
        compiled, device, (blocks, 1, 1), _ARGUMENT_BYTES, dependent=True, allow_defects=allow_defects
    )
    _REST.pack_into(
        launcher.buffer,
        _POINTERS_AT + _POINTERS.size,
        problem.experts,
        inner,
        columns,
        _weight_tiles(columns if weight_rows is None else weight_rows),
        problem.top_k,
        *(problem.w13_bias_strides if weight_rows is not None else (1, 0)),
    )
    return launcher


def plan(
    problem: MoeProblem, configuration: Any, device: Device, *, allow_defects: bool = False
) -> LaunchPlan:
    check(problem, configuration)
    tile: MoeHopperConfiguration = configuration
    first = FirstProduct(problem, tile, device, allow_defects=allow_defects)
    # Early starts are safe although the second product reads routing and weights, and lets its successor start,
    # before it waits for the first: that one lets it start only after it has itself waited for routing, and the
    # combination waits for all of the second, of which every block ends only after the first product.
    compiled = kernel(tile, None, problem.dtype)
    down = _launcher(problem, compiled, device, allow_defects, problem.intermediate, problem.hidden)
    w2_map = _plain_weight_map(down, problem, tile, problem.intermediate, problem.hidden)
    rows_map = TensorMap(
        down.buffer,
        MAP_BYTES,
        problem.dtype,
        (problem.intermediate, problem.slots),
        (problem.intermediate,),
        (configs.INNER, tile.step),
    )
    sort, join = Routing(problem, device, _ARCHITECTURE), Combine(problem, device, _ARCHITECTURE)
    _, offsets_at, slots_at, counts_at, inner_at, rows_at, total = sorted_workspace(problem, sort)
    pack, with_biases = _POINTERS.pack_into, addresses_of_biases(problem)

    def launch(
        hidden: int,
        w13: int,
        w2: int,
        topk_weights: int,
        topk_ids: int,
        *rest: int,
    ) -> None:
        w13_bias, w2_bias, output, *results, workspace, stream = (
            with_biases(rest) if with_biases else (0, 0, *rest)
        )
        offsets, slots = workspace + offsets_at, workspace + slots_at
        inner, rows = workspace + inner_at, workspace + rows_at
        # Maps are re-addressed when their tensors moved.
        if w2_map.address != w2:
            w2_map.move(w2)
        if rows_map.address != inner:
            rows_map.move(inner)
        sort.launch(topk_ids, offsets, slots, workspace + counts_at, workspace, stream)
        kept = results[0] if results else 0
        first.launch(hidden, w13, inner, offsets, slots, workspace, kept, w13_bias, stream)
        pack(down.buffer, _POINTERS_AT, 0, rows, offsets, slots, workspace + 4, 0, w2_bias)
        down.start(stream)
        join.launch(rows, topk_weights, topk_ids, output, stream)

    return LaunchPlan(launch, total)


def _plain_weight_map(
    launcher: Launcher, problem: MoeProblem, tile: MoeHopperConfiguration, inner: int, rows: int
) -> TensorMap:
    """Boxes of a block's share of a tile's 256 rows, of a weight (experts, rows, inner)."""
    return TensorMap(
        launcher.buffer,
        0,
        problem.dtype,
        (inner, rows, problem.experts),
        (inner, rows * inner),
        (configs.INNER, configs.WEIGHT_ROWS // tile.cluster),
    )


def _first_weight_map(launcher: Launcher, problem: MoeProblem, tile: MoeHopperConfiguration) -> TensorMap:
    """Of w13. Gated: boxes in which 16 gate rows and the 16 up rows of the same columns take turns."""
    hidden, intermediate = problem.hidden, problem.intermediate
    if not problem.gated:
        return _plain_weight_map(launcher, problem, tile, hidden, intermediate)
    expert = 2 * intermediate * hidden
    strides = {
        W13Layout.CONCAT: (hidden, intermediate * hidden, 16 * hidden, expert),
        W13Layout.INTERLEAVED: (2 * hidden, hidden, 32 * hidden, expert),
    }[problem.w13_layout]
    return TensorMap(
        launcher.buffer,
        0,
        problem.dtype,
        (hidden, 16, 2, intermediate // 16, problem.experts),
        strides,
        (configs.INNER, 16, 2, configs.WEIGHT_ROWS // 32 // tile.cluster),
    )
