"""The backward pass of a mixture of experts on sm_80 and later by mma.sync: two grouped products
(`moe_backward_portable.cu`), the combination of the input's gradient, the routing weights' gradient, and the weights'
gradients (`moe_backward_portable_weights.cu`).

The forward pass keeps nothing for it, and its first product runs again.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flashmoe_science.configs.moe import backward_portable as configs
from flashmoe_science.configs.moe import portable as forward_configs
from flashmoe_science.configs.moe.backward_portable import BackwardTile, MoePortableBackward
from flashmoe_science.configs.moe.portable import ProductTile
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.launch import Launcher, LaunchPlan, addressed, loaded, type_macros
from flashmoe_science.cuda.moe import combine, portable
from flashmoe_science.cuda.moe.combine import Combine
from flashmoe_science.cuda.moe.gradients import bias
from flashmoe_science.cuda.moe.gradients.problem import (
    COMPOSED,
    OVERRIDE_VARIABLE,
    MoeBackwardKind,
    MoeBackwardProblem,
)
from flashmoe_science.cuda.moe.portable import Product
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.cuda.moe.routing import TICKETS_BYTES, Routing
from flashmoe_science.cuda.workspace import place
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import overlaps
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.moe_arguments import ACTIVATION_CODES, Activation, W13Layout

_DTYPES = (torch.bfloat16, torch.float16)
# input, weights, output, expert_offsets, sorted_slots, z, topk_weights, activated, sums
_PRODUCT = struct.Struct("9Q")
_PRODUCT_REST = struct.Struct("8i")
_WEIGHTS = struct.Struct("5Q")  # left, right, output, expert_offsets, sorted_slots
_WEIGHTS_REST = struct.Struct("5i")
_FLOAT_BYTES = 4
_MOST_BLOCKS = (1 << 31) - 1


_MOST_WORK = 1 << 34
"""Multiply-adds of an expert in a forward pass up to which these are the default. PyTorch's operations take about half
a millisecond for each expert besides their products, which are faster: both take as long at about 2e10 on an H200
(docs/kernels/notebooks/moe-backward.md)."""


def choose(problem: MoeBackwardProblem, device: Device) -> Choice | None:
    if why_not(problem, device) is not None:
        return None
    return Choice(
        MoeBackwardKind.PORTABLE,
        configs.configuration(device.architecture),
        "mma.sync products of rows sorted by expert",
    )


def why_not(problem: MoeBackwardProblem, device: Device) -> str | None:
    reason = _why_not_default(problem.forward)
    if reason is not None:
        return reason
    if device.architecture not in configs.tuned_architectures():
        return f"there are no tiles for {device.architecture}"
    reason = _refusal(problem, configs.configuration(device.architecture))
    if reason is not None:
        return reason
    return portable.why_not(replace(problem.forward, keeps=False), device)


def _why_not_default(problem: MoeProblem) -> str | None:
    """Why another way is taken, unless the environment names these kernels."""
    named = os.environ.get(OVERRIDE_VARIABLE)
    if named == MoeBackwardKind.PORTABLE.value:
        return None
    if named in (MoeBackwardKind.HOPPER.value, COMPOSED):
        return f"{OVERRIDE_VARIABLE} asks for {named}"
    work = problem.rows_per_expert * problem.hidden * (problem.w13_rows + problem.intermediate)
    if work > _MOST_WORK:
        return (
            f"PyTorch's operations are faster where an expert has {work:.0e} multiply-adds; "
            f"{OVERRIDE_VARIABLE}={MoeBackwardKind.PORTABLE.value} asks for it"
        )
    return None


def _refusal(problem: MoeBackwardProblem, tiles: MoePortableBackward) -> str | None:
    if problem.kept:
        return "it takes nothing that a forward pass kept"
    forward = problem.forward
    blocks = (
        _row_tiles(forward, tiles.first) * _across(forward.intermediate, tiles.first.block_n),
        _row_tiles(forward, tiles.second) * _across(forward.hidden, tiles.second.block_n),
        *(
            forward.experts * _across(rows, tiles.weights.block_m) * _across(columns, tiles.weights.block_n)
            for rows, columns in ((forward.hidden, forward.intermediate), (forward.w13_rows, forward.hidden))
        ),
    )
    return f"it cannot count {max(blocks)} tiles" if max(blocks) > _MOST_BLOCKS else None


def kernels(architecture: str) -> list[CudaKernel]:
    """Those of every configuration, for all activations and types, besides the forward pass's; none before sm_80."""
    built = [
        kernel
        for tiles in configs.all_configurations(architecture)
        for dtype in _DTYPES
        for kernel in (
            *(first_kernel(tiles.first, activation, dtype, architecture) for activation in Activation),
            second_kernel(tiles.second, dtype, architecture),
            *(
                weights_kernel(tiles.weights, dtype, architecture, second=second, accumulates=accumulates)
                for second in (True, False)
                for accumulates in (True, False)
            ),
            *(
                projection_kernel(configuration.up, dtype, architecture)
                for configuration in forward_configs.all_configurations(architecture)
            ),
            *(bias.kernel(dtype, second=second, architecture=architecture) for second in (True, False)),
            *(bias.routing_kernel(dtype, ids64, architecture=architecture) for ids64 in (False, True)),
            *(combine.kernel(dtype, ids64, architecture, weighted=False) for ids64 in (False, True)),
        )
    ]
    if not built:
        return []
    sums = [bias.parts_kernel(ids64, architecture=architecture) for ids64 in (False, True)]
    each_once = {one.label: one for one in (*built, *sums)}
    return list(each_once.values())


def _tile_macros(tile: BackwardTile, dtype: torch.dtype) -> dict[str, int]:
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.stages,
        "WARPS_M": tile.warps_m,
        "WARPS_N": tile.warps_n,
        "MIN_BLOCKS": tile.blocks,
        **type_macros(dtype),
    }


def _product_kernel(
    tile: BackwardTile, activation: Activation | None, dtype: torch.dtype, architecture: str
) -> CudaKernel:
    return CudaKernel(
        source="moe_backward_portable.cu",
        function="moe_backward_portable",
        architecture=architecture,
        macros={
            **_tile_macros(tile, dtype),
            "FIRST": int(activation is not None),
            "ACTIVATION": 0 if activation is None else ACTIVATION_CODES[activation],
        },
        threads_per_block=tile.threads,
        dynamic_shared_bytes=tile.shared_bytes,
    )


def first_kernel(
    tile: BackwardTile, activation: Activation, dtype: torch.dtype, architecture: str
) -> CudaKernel:
    """Gradient of what the activation is applied to, activated rows, and parts of the routing weights' gradient."""
    return _product_kernel(tile, activation, dtype, architecture)


def second_kernel(tile: BackwardTile, dtype: torch.dtype, architecture: str) -> CudaKernel:
    """Gradient of the input, by slot."""
    return _product_kernel(tile, None, dtype, architecture)


def weights_kernel(
    tile: BackwardTile, dtype: torch.dtype, architecture: str, *, second: bool, accumulates: bool
) -> CudaKernel:
    """Gradient of w2 (`second`) or w13."""
    return CudaKernel(
        source="moe_backward_portable_weights.cu",
        function="moe_backward_portable_weights",
        architecture=architecture,
        macros={
            **_tile_macros(tile, dtype),
            "GATHER_LEFT": int(second),
            "ACCUMULATE": int(accumulates),
        },
        threads_per_block=tile.threads,
        dynamic_shared_bytes=tile.shared_bytes,
    )


def projection_kernel(tile: ProductTile, dtype: torch.dtype, architecture: str) -> CudaKernel:
    """What the activation is applied to, in sorted order: the forward pass's first product without one."""
    made = portable.kernel(tile, Product.UP, Activation.SILU_NO_MUL, dtype, architecture)
    return replace(made, macros={**made.macros, "ACTIVATION": 0})


def check(problem: MoeBackwardProblem, configuration: Any) -> None:
    if not isinstance(configuration, MoePortableBackward):
        raise InputError(
            f"the portable kernels of the backward pass take a MoePortableBackward, not {configuration!r}"
        )
    reason = _refusal(problem, configuration)
    if reason is not None:
        raise InputError(f"the portable kernels of the backward pass do not take it: {reason}")


def plan(
    problem: MoeBackwardProblem, configuration: Any, device: Device, *, allow_defects: bool = False
) -> LaunchPlan:
    """Launches take the addresses that those of `gradients.hopper.plan` take; z is 0."""
    check(problem, configuration)
    tiles: MoePortableBackward = configuration
    forward, needs = problem.forward, problem.needs
    make = _Make(forward, device, allow_defects)
    sort = Routing(forward, device, device.architecture)
    again, first = make.projection(), make.gradient_of_projection(tiles.first)
    second = make.gradient_of_input(tiles.second) if needs.hidden_states else None
    join = (
        Combine(forward, device, device.architecture, weighted=False).launch if needs.hidden_states else None
    )
    parts = _parts(forward, tiles.first)
    routed = (
        bias.sum_of_parts(make.dependent, forward, parts, architecture=device.architecture)
        if needs.topk_weights
        else None
    )
    routed_bias = (
        bias.gradient_of_routing(make.dependent, forward, architecture=device.architecture)
        if needs.topk_weights and forward.w2_biased
        else None
    )
    w2_gradient = (
        make.gradient_of_weights(tiles.weights, second=True, accumulates=problem.accumulates_w2)
        if needs.w2
        else None
    )
    w13_gradient = (
        make.gradient_of_weights(tiles.weights, second=False, accumulates=problem.accumulates_w13)
        if needs.w13
        else None
    )
    # The gradient of the projections lies in the order of w13's rows.
    in_order = replace(forward, w13_layout=W13Layout.CONCAT)
    w2_bias_gradient, w13_bias_gradient = (
        bias.gradient(make.dependent, in_order, second=of_second, architecture=device.architecture)
        if needed
        else None
        for of_second, needed in ((True, needs.w2_bias), (False, needs.w13_bias))
    )
    row_bytes = forward.slots * forward.dtype.itemsize
    offsets_at, slots_at, counts_at, z_at, gradient_at, activated_at, sums_at, rows_at, total = place(
        TICKETS_BYTES,
        sort.offsets_bytes,
        sort.slots_bytes,
        sort.counts_bytes,
        row_bytes * forward.w13_rows,
        row_bytes * forward.w13_rows,
        row_bytes * forward.intermediate,
        forward.slots * parts * _FLOAT_BYTES,
        row_bytes * forward.hidden if needs.hidden_states else 0,
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
        z, gradient, activated = workspace + z_at, workspace + gradient_at, workspace + activated_at
        sums, rows = workspace + sums_at, workspace + rows_at
        sort.launch(topk_ids, offsets, slots, workspace + counts_at, workspace, stream)
        again(hidden, w13, z, offsets, slots, workspace, w13_bias, stream)
        first(grad_output, w2, gradient, offsets, slots, z, topk_weights, activated, sums, stream)
        if second is not None and join is not None:
            second(gradient, w13, rows, offsets, slots, 0, 0, 0, 0, stream)
            join(rows, 0, topk_ids, grad_hidden, stream)
        if routed is not None:
            routed(sums, topk_ids, offsets, slots, grad_weights, stream)
        if routed_bias is not None:
            routed_bias(grad_output, w2_bias, topk_ids, offsets, slots, grad_weights, stream)
        if w2_gradient is not None:
            w2_gradient(grad_output, activated, grad_w2, offsets, slots, stream)
        if w13_gradient is not None:
            w13_gradient(gradient, hidden, grad_w13, offsets, slots, stream)
        if w2_bias_gradient is not None:
            w2_bias_gradient(grad_output, topk_weights, grad_w2_bias, offsets, slots, stream)
        if w13_bias_gradient is not None:
            w13_bias_gradient(gradient, 0, grad_w13_bias, offsets, slots, stream)

    return LaunchPlan(launch, total)


def _across(size: int, block: int) -> int:
    return -(-size // block)


def _row_tiles(problem: MoeProblem, tile: BackwardTile) -> int:
    """Whatever the routing: each expert with rows has at most one tile that is not full."""
    return problem.slots // tile.block_m + min(problem.experts, problem.slots)


def _parts(problem: MoeProblem, tile: BackwardTile) -> int:
    return _across(problem.intermediate, tile.block_n) * (tile.block_n // configs.PART_COLUMNS)


class _Make:
    """Makes the launches of one problem's products."""

    def __init__(self, problem: MoeProblem, device: Device, allow_defects: bool) -> None:
        self._problem = problem
        self._device = device
        self._allow_defects = allow_defects

    def _launcher(
        self, compiled: CudaKernel, argument_bytes: int, blocks: int, *, dependent: bool = False
    ) -> Launcher:
        size = -(-argument_bytes // 64) * 64
        return loaded(
            compiled,
            self._device,
            (blocks, 1, 1),
            size,
            dependent=dependent,
            allow_defects=self._allow_defects,
        )

    def dependent(self, compiled: CudaKernel, argument_bytes: int, blocks: int) -> Launcher:
        """Of a kernel that waits for the one before it, where that can be."""
        overlap = overlaps(self._device.architecture)
        return self._launcher(compiled, argument_bytes, blocks, dependent=overlap)

    def projection(self) -> Callable[..., None]:
        """That of the forward pass: (input, weights, output, offsets, slots, ticket, bias, stream)."""
        # All rows of w13 are columns of one part.
        problem = replace(
            self._problem,
            intermediate=self._problem.w13_rows,
            activation=Activation.SILU_NO_MUL,
            w13_layout=W13Layout.CONCAT,
        )
        architecture = self._device.architecture
        tile = forward_configs.configuration(architecture, problem.rows_per_expert).up
        launcher = self.dependent(
            projection_kernel(tile, problem.dtype, architecture),
            portable.ARGUMENT_BYTES,
            portable.grid(problem, Product.UP, tile, self._device),
        )
        portable.write_fields(launcher.buffer, problem, Product.UP, tile, self._device)
        return addressed(launcher, portable.POINTERS)

    def gradient_of_projection(self, tile: BackwardTile) -> Callable[..., None]:
        problem = self._problem
        compiled = first_kernel(tile, problem.activation, problem.dtype, self._device.architecture)
        gate_step, gate_to_up = problem.w13_bias_strides
        return self._product(compiled, tile, problem.hidden, problem.intermediate, gate_step, gate_to_up)

    def gradient_of_input(self, tile: BackwardTile) -> Callable[..., None]:
        problem = self._problem
        compiled = second_kernel(tile, problem.dtype, self._device.architecture)
        return self._product(compiled, tile, problem.w13_rows, problem.hidden, 0, 0)

    def _product(
        self,
        compiled: CudaKernel,
        tile: BackwardTile,
        inner: int,
        columns: int,
        gate_step: int,
        gate_to_up: int,
    ) -> Callable[..., None]:
        problem = self._problem
        column_tiles = _across(columns, tile.block_n)
        blocks = _row_tiles(problem, tile) * column_tiles
        launcher = self._launcher(compiled, _PRODUCT.size + _PRODUCT_REST.size, blocks)
        _PRODUCT_REST.pack_into(
            launcher.buffer,
            _PRODUCT.size,
            problem.experts,
            problem.top_k,
            inner,
            columns,
            column_tiles,
            problem.slots,
            gate_step,
            gate_to_up,
        )
        return addressed(launcher, _PRODUCT)

    def gradient_of_weights(
        self, tile: BackwardTile, *, second: bool, accumulates: bool
    ) -> Callable[..., None]:
        problem = self._problem
        compiled = weights_kernel(
            tile, problem.dtype, self._device.architecture, second=second, accumulates=accumulates
        )
        rows, columns = (
            (problem.hidden, problem.intermediate) if second else (problem.w13_rows, problem.hidden)
        )
        row_tiles, column_tiles = _across(rows, tile.block_m), _across(columns, tile.block_n)
        blocks = problem.experts * row_tiles * column_tiles
        launcher = self._launcher(compiled, _WEIGHTS.size + _WEIGHTS_REST.size, blocks)
        _WEIGHTS_REST.pack_into(
            launcher.buffer, _WEIGHTS.size, problem.top_k, rows, columns, row_tiles, column_tiles
        )
        return addressed(launcher, _WEIGHTS)
