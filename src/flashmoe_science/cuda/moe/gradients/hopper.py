"""The backward pass of a mixture of experts on Hopper: two grouped products (`moe_backward_hopper.cu`), the combination
of the input's gradient, the routing weights' gradient, and the weights' gradients (`moe_backward_weights.cu`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch

from flashmoe_science.configs.moe import backward_hopper as configs
from flashmoe_science.configs.moe import hopper as forward_configs
from flashmoe_science.configs.moe.backward_hopper import MoeHopperBackward
from flashmoe_science.configs.moe.hopper import MoeHopperConfiguration
from flashmoe_science.cuda import wgmma
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.launch import Launcher, LaunchPlan, loaded, type_macros
from flashmoe_science.cuda.moe import combine, hopper
from flashmoe_science.cuda.moe.combine import Combine
from flashmoe_science.cuda.moe.gradients import bias
from flashmoe_science.cuda.moe.gradients.problem import MoeBackwardKind, MoeBackwardProblem
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.cuda.moe.routing import TICKETS_BYTES, Routing
from flashmoe_science.cuda.tensor_map import MAP_BYTES, TensorMap
from flashmoe_science.cuda.workspace import place
from flashmoe_science.errors import InputError
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.moe_arguments import ACTIVATION_CODES, Activation, W13Layout

_ARCHITECTURE = "sm_90a"
# tokens, topk_weights, output, activated, sums, expert_offsets, sorted_slots, ticket
_PRODUCT = struct.Struct("8Q")
_PRODUCT_REST = struct.Struct("6i")
_MAPS, _MAPS_OF_FIRST = 2, 4
_WEIGHTS = struct.Struct("5Q")  # tokens, output, expert_offsets, sorted_slots, ticket
_WEIGHTS_REST = struct.Struct("9i")
_FLOAT_BYTES = 4
_FIRST_TICKET, _SECOND_TICKET, _W2_TICKET, _W13_TICKET, _AGAIN_TICKET = (4 * i for i in range(5))
_MOST_TILES = 1 << 30


def choose(problem: MoeBackwardProblem, device: Device) -> Choice | None:
    if why_not(problem, device) is not None:
        return None
    forward = problem.forward
    tiles = configs.configuration(forward.rows_per_expert, forward.intermediate, gated=forward.gated)
    reason = "TMA and wgmma products of rows sorted by expert"
    if tiles.second.cluster > 1:
        reason += ", pairs of blocks share the second product's weights"
    return Choice(MoeBackwardKind.HOPPER, tiles, reason)


def why_not(problem: MoeBackwardProblem, device: Device) -> str | None:
    reason = hopper.why_not(problem.forward, device)
    return _refusal(problem) if reason is None else reason


_SPILLS = Activation.GELU_NO_MUL
"""Its first product has no registers left for what it would keep."""


def _refusal(problem: MoeBackwardProblem) -> str | None:
    if problem.forward.activation is _SPILLS:
        return f"its forward pass would spill registers with {_SPILLS.value}"
    forward = problem.forward
    columns = configs.WIDE.weights.tokens
    tiles = _tiles(forward.hidden) * -(-max(forward.w13_rows, forward.intermediate) // columns)
    if forward.experts * tiles > _MOST_TILES:
        return f"it cannot count {forward.experts * tiles} tiles of weights"
    return None


def kernels(architecture: str) -> list[CudaKernel]:
    if not wgmma.built_for(architecture):
        return []
    dtypes = torch.bfloat16, torch.float16
    activations = [activation for activation in Activation if activation is not _SPILLS]
    keeping = [
        hopper.kernel(tile, activation, dtype, keeps=True)
        for tile in forward_configs.all_configurations()
        for activation in activations
        if activation.gated or tile.cluster == 1
        for dtype in dtypes
    ]
    products = [
        kernel
        for dtype in dtypes
        for kernel in (
            *(first_kernel(configs.WIDE, activation, dtype) for activation in activations),
            *(second_kernel(configs.WIDE, gated, dtype) for gated in (True, False)),
            second_kernel(configs.PAIRS, True, dtype),  # the other products are as those of WIDE
            *(
                weights_kernel(configs.WIDE, dtype, second=second, accumulates=accumulates)
                for second in (True, False)
                for accumulates in (True, False)
            ),
        )
    ]
    sums = [
        combine.kernel(dtype, ids64, _ARCHITECTURE, weighted=False)
        for dtype in dtypes
        for ids64 in (False, True)
    ]
    biases = [
        kernel
        for dtype in dtypes
        for kernel in (
            *(bias.kernel(dtype, second=second) for second in (True, False)),
            *(bias.routing_kernel(dtype, ids64) for ids64 in (False, True)),
        )
    ]
    return [*keeping, *products, *sums, *(bias.parts_kernel(ids64) for ids64 in (False, True)), *biases]


def _product_kernel(
    tile: MoeHopperConfiguration,
    activation: Activation | None,
    dtype: torch.dtype,
    *,
    gather: bool,
    shared_bytes: int,
) -> CudaKernel:
    return CudaKernel(
        source="moe_backward_hopper.cu",
        function="moe_backward_hopper",
        architecture=_ARCHITECTURE,
        macros={
            **tile.macros,
            "GATHER": int(gather),
            "ACTIVATION": 0 if activation is None else ACTIVATION_CODES[activation],
            **type_macros(dtype),
        },
        threads_per_block=forward_configs.THREADS,
        dynamic_shared_bytes=shared_bytes,
        cluster_blocks=tile.cluster,
    )


def first_kernel(tiles: MoeHopperBackward, activation: Activation, dtype: torch.dtype) -> CudaKernel:
    """Gradient of what the activation is applied to, activated rows, and parts of the routing weights' gradient."""
    return _product_kernel(tiles.first, activation, dtype, gather=True, shared_bytes=tiles.first_shared_bytes)


def second_kernel(tiles: MoeHopperBackward, gated: bool, dtype: torch.dtype) -> CudaKernel:
    """Gradient of the input, by slot."""
    activation = Activation.SILU if gated else None
    return _product_kernel(
        tiles.second, activation, dtype, gather=False, shared_bytes=tiles.second.shared_bytes
    )


def weights_kernel(
    tiles: MoeHopperBackward, dtype: torch.dtype, *, second: bool, accumulates: bool
) -> CudaKernel:
    """Gradient of w2 (`second`) or w13."""
    tile = tiles.weights
    return CudaKernel(
        source="moe_backward_weights.cu",
        function="moe_backward_weights",
        architecture=_ARCHITECTURE,
        macros={
            "TOKENS": tile.tokens,
            "STAGES": tile.stages,
            "SECOND": int(second),
            "ACCUMULATE": int(accumulates),
            **type_macros(dtype),
        },
        threads_per_block=forward_configs.THREADS,
        dynamic_shared_bytes=tile.shared_bytes,
    )


def check(problem: MoeBackwardProblem, configuration: Any) -> None:
    if not isinstance(configuration, MoeHopperBackward):
        raise InputError(
            f"the Hopper kernels of the backward pass take a MoeHopperBackward, not {configuration!r}"
        )
    if configuration.first.cluster != 1 or configuration.weights.cluster != 1:
        raise InputError("pairs of blocks are for the second product of the backward pass alone")
    first, rows = configuration.first, configs.BOX_ROWS
    if first.tokens % rows or first.step % rows or first.step > 2 * rows:
        raise InputError(
            f"the first product of the backward pass takes tokens and a step that are multiples of {rows}, and a step "
            f"of at most {2 * rows}, not {first.tokens} and {first.step}"
        )
    hopper.check(problem.forward, hopper.configuration(problem.forward))
    reason = _refusal(problem)
    if reason is not None:
        raise InputError(f"the Hopper kernels of the backward pass do not take it: {reason}")


def plan(
    problem: MoeBackwardProblem, configuration: Any, device: Device, *, allow_defects: bool = False
) -> LaunchPlan:
    """Launches take the addresses of grad_output, hidden_states, w13, w2, topk_weights, topk_ids, z (0 if it is not
    kept), of the biases of w13 and w2 (0 where there is none), of the gradients of hidden_states, w13, w2, topk_weights
    and both biases (0 for one that is not needed), and of the workspace.

    Every launch may start while the one before it ends. Each of them lets the next one start only after it has itself
    waited, except the second product, which lets the combination start early: that waits for all of the second
    product, of which every block ends only after the first one.
    """
    check(problem, configuration)
    tiles: MoeHopperBackward = configuration
    forward, needs = problem.forward, problem.needs
    make = _Make(forward, device, allow_defects)
    sort = Routing(forward, device, _ARCHITECTURE)
    again = None if problem.kept else make.first_product()
    first = make.gradient_of_kept(tiles)
    second = make.gradient_of_input(tiles) if needs.hidden_states else None
    join = Combine(forward, device, _ARCHITECTURE, weighted=False) if needs.hidden_states else None
    routed = bias.sum_of_parts(make.launcher, forward, _parts(forward)) if needs.topk_weights else None
    routed_bias = (
        bias.gradient_of_routing(make.launcher, forward) if needs.topk_weights and forward.w2_biased else None
    )
    w2_bias_gradient = bias.gradient(make.launcher, forward, second=True) if needs.w2_bias else None
    w13_bias_gradient = bias.gradient(make.launcher, forward, second=False) if needs.w13_bias else None
    w2_gradient = w13_gradient = None
    if needs.w2:
        w2_gradient = make.gradient_of_weights(tiles, second=True, accumulates=problem.accumulates_w2)
    if needs.w13:
        w13_gradient = make.gradient_of_weights(tiles, second=False, accumulates=problem.accumulates_w13)
    kept_bytes = forward.slots * forward.w13_rows * forward.dtype.itemsize
    activated_bytes = forward.slots * forward.intermediate * forward.dtype.itemsize
    sums_bytes = forward.slots * _parts(forward) * _FLOAT_BYTES
    rows_bytes = forward.slots * forward.hidden * forward.dtype.itemsize
    offsets_at, slots_at, counts_at, z_at, gradient_at, activated_at, sums_at, rows_at, total = place(
        TICKETS_BYTES,
        sort.offsets_bytes,
        sort.slots_bytes,
        sort.counts_bytes,
        0 if problem.kept else kept_bytes,
        kept_bytes,
        activated_bytes,
        sums_bytes,
        rows_bytes if needs.hidden_states else 0,
    )[1:]

    def launch(
        grad_output: int,
        hidden: int,
        w13: int,
        w2: int,
        topk_weights: int,
        topk_ids: int,
        z: int,
        w13_bias: int,
        w2_bias: int,
        grad_hidden: int,
        grad_w13: int,
        grad_w2: int,
        grad_weights: int,
        grad_w13_bias: int,
        grad_w2_bias: int,
        workspace: int,
        stream: int,
    ) -> None:
        offsets, slots = workspace + offsets_at, workspace + slots_at
        gradient, activated = workspace + gradient_at, workspace + activated_at
        sums, rows = workspace + sums_at, workspace + rows_at
        sort.launch(topk_ids, offsets, slots, workspace + counts_at, workspace, stream)
        if again is not None:
            z = workspace + z_at
            again(hidden, w13, activated, offsets, slots, workspace + _AGAIN_TICKET, z, w13_bias, stream)
        first(
            w2,
            z,
            grad_output,
            topk_weights,
            gradient,
            activated,
            sums,
            offsets,
            slots,
            workspace + _FIRST_TICKET,
            stream,
        )
        if second is not None and join is not None:
            second(w13, gradient, 0, 0, rows, 0, 0, offsets, slots, workspace + _SECOND_TICKET, stream)
            join.launch(rows, 0, topk_ids, grad_hidden, stream)
        if routed is not None:
            routed(sums, topk_ids, offsets, slots, grad_weights, stream)
        if routed_bias is not None:
            routed_bias(grad_output, w2_bias, topk_ids, offsets, slots, grad_weights, stream)
        if w2_gradient is not None:
            w2_gradient(activated, grad_output, grad_w2, offsets, slots, workspace + _W2_TICKET, stream)
        if w13_gradient is not None:
            w13_gradient(gradient, hidden, grad_w13, offsets, slots, workspace + _W13_TICKET, stream)
        if w2_bias_gradient is not None:
            w2_bias_gradient(grad_output, topk_weights, grad_w2_bias, offsets, slots, stream)
        if w13_bias_gradient is not None:
            w13_bias_gradient(gradient, 0, grad_w13_bias, offsets, slots, stream)

    return LaunchPlan(launch, total)


def _tiles(columns: int) -> int:
    return -(-columns // forward_configs.WEIGHT_ROWS)


def _parts(problem: MoeProblem) -> int:
    return configs.PARTS_PER_TILE * _tiles(problem.intermediate)


class _Make:
    """Makes the launches of one problem's products."""

    def __init__(self, problem: MoeProblem, device: Device, allow_defects: bool) -> None:
        self._problem = problem
        self._device = device
        self._allow_defects = allow_defects
        self._parts = 2 if problem.gated else 1

    def launcher(self, compiled: CudaKernel, argument_bytes: int, blocks: int | None = None) -> Launcher:
        if blocks is None:
            blocks = self._device.multiprocessors // compiled.cluster_blocks * compiled.cluster_blocks
        size = -(-argument_bytes // 64) * 64
        return loaded(
            compiled, self._device, (blocks, 1, 1), size, dependent=True, allow_defects=self._allow_defects
        )

    def _rows_map(self, launcher: Launcher, at: int, columns: int, box_rows: int) -> TensorMap:
        """Of sorted rows."""
        problem = self._problem
        return TensorMap(
            launcher.buffer,
            at,
            problem.dtype,
            (columns, problem.slots),
            (columns,),
            (configs.PANEL, box_rows),
        )

    def first_product(self) -> Callable[..., None]:
        """That of the forward pass, which keeps."""
        problem = self._problem
        tile = hopper.configuration(problem)
        return hopper.FirstProduct(problem, tile, self._device, allow_defects=self._allow_defects).launch

    def gradient_of_kept(self, tiles: MoeHopperBackward) -> Callable[..., None]:
        problem = self._problem
        inner, columns = problem.hidden, problem.intermediate
        compiled = first_kernel(tiles, problem.activation, problem.dtype)
        sizes, strides = (columns, inner, 1, problem.experts), (columns, 0, inner * columns)
        launcher, product = self._product(
            compiled, tiles.first, sizes, strides, problem.w13_rows, inner, columns, maps=_MAPS_OF_FIRST
        )
        gradient_map, activated_map = (
            TensorMap(
                launcher.buffer,
                (_MAPS + n) * MAP_BYTES,
                problem.dtype,
                (columns, parts, problem.slots, 1),
                (columns, parts * columns, 0),
                (configs.PANEL, 1, configs.BOX_ROWS),
            )
            for n, parts in enumerate((self._parts, 1))
        )

        def launch(weight: int, rows: int, tokens: int, topk_weights: int, *outputs_and_rest: int) -> None:
            gradient, activated = outputs_and_rest[:2]
            if gradient_map.address != gradient:
                gradient_map.move(gradient)
            if activated_map.address != activated:
                activated_map.move(activated)
            product(weight, rows, tokens, topk_weights, *outputs_and_rest)

        return launch

    def gradient_of_input(self, tiles: MoeHopperBackward) -> Callable[..., None]:
        problem = self._problem
        inner, columns = problem.intermediate, problem.hidden
        compiled = second_kernel(tiles, problem.gated, problem.dtype)
        expert = problem.w13_rows * columns
        if not problem.gated:
            strides = (columns, 0, expert)
        elif problem.w13_layout is W13Layout.CONCAT:
            strides = (columns, inner * columns, expert)
        else:
            strides = (2 * columns, columns, expert)
        sizes = (columns, inner, self._parts, problem.experts)
        return self._product(compiled, tiles.second, sizes, strides, problem.w13_rows, inner, columns)[1]

    def _product(
        self,
        compiled: CudaKernel,
        tile: MoeHopperConfiguration,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        row_columns: int,
        inner: int,
        columns: int,
        maps: int = _MAPS,
    ) -> tuple[Launcher, Callable[..., None]]:
        """`sizes`, `strides`: of the weight (columns, inner, parts, experts). Of `maps` those behind the first two are
        the caller's to write.
        """
        problem = self._problem
        addresses_at = maps * MAP_BYTES
        launcher = self.launcher(compiled, addresses_at + _PRODUCT.size + _PRODUCT_REST.size)
        weight_map = TensorMap(
            launcher.buffer, 0, problem.dtype, sizes, strides, (configs.PANEL, configs.PANEL)
        )
        rows_map = self._rows_map(launcher, MAP_BYTES, row_columns, tile.step)
        _PRODUCT_REST.pack_into(
            launcher.buffer,
            addresses_at + _PRODUCT.size,
            problem.experts,
            inner,
            columns,
            _tiles(columns),
            problem.top_k,
            problem.slots,
        )

        def launch(weight: int, rows: int, *addresses_and_stream: int) -> None:
            # Maps are re-addressed when their tensors moved.
            if weight_map.address != weight:
                weight_map.move(weight)
            if rows_map.address != rows:
                rows_map.move(rows)
            _PRODUCT.pack_into(launcher.buffer, addresses_at, *addresses_and_stream[:-1])
            launcher.start(addresses_and_stream[-1])

        return launcher, launch

    def gradient_of_weights(
        self, tiles: MoeHopperBackward, *, second: bool, accumulates: bool
    ) -> Callable[..., None]:
        problem = self._problem
        compiled = weights_kernel(tiles, problem.dtype, second=second, accumulates=accumulates)
        columns = problem.intermediate if second else problem.w13_rows
        launcher = self.launcher(compiled, MAP_BYTES + _WEIGHTS.size + _WEIGHTS_REST.size)
        rows_map = self._rows_map(launcher, 0, columns, configs.PANEL)
        interleaved = problem.gated and problem.w13_layout is W13Layout.INTERLEAVED
        _WEIGHTS_REST.pack_into(
            launcher.buffer,
            MAP_BYTES + _WEIGHTS.size,
            problem.experts,
            problem.hidden,
            columns,
            _tiles(problem.hidden),
            -(-columns // tiles.weights.tokens),
            problem.top_k,
            problem.intermediate,
            2 if interleaved else 1,
            1 if interleaved else problem.intermediate,
        )

        def launch(rows: int, *addresses_and_stream: int) -> None:
            if rows_map.address != rows:
                rows_map.move(rows)
            _WEIGHTS.pack_into(launcher.buffer, MAP_BYTES, *addresses_and_stream[:-1])
            launcher.start(addresses_and_stream[-1])

        return launch
