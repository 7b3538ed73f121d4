"""Backward passes and training steps of experts that come with the lab; imported when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from cudadent42.model.implementations import Call, Implementation, Prepare, UnsupportedCaseError
from cudadent42.operations.moe import implementations as forward
from cudadent42.operations.moe.case import MoeCase
from cudadent42.operations.moe_backward.case import MoeBackwardCase, MoeTrainingStepCase

if TYPE_CHECKING:
    from torch import Tensor

    from cudadent42.operations.moe.inputs import MoeInputs
    from cudadent42.operations.moe_backward.inputs import MoeGradientInputs

PrepareForward = Callable[[MoeBackwardCase, "MoeInputs"], Call]


def prepare_backward(prepare: PrepareForward, case: MoeBackwardCase, inputs: MoeGradientInputs) -> Call:
    """The forward pass once, then the gradients of its result as often as they are asked for."""
    import torch

    from cudadent42.operations.moe_backward.inputs import differentiated

    leaves = inputs.leaves
    output = prepare(case, leaves)()
    _require_gradient(output)
    wanted, gradient = differentiated(leaves), inputs.output_gradient

    def call() -> Tensor:
        gradients: Tensor = torch.autograd.grad(output, wanted, gradient, retain_graph=True)  # type: ignore[assignment]
        return gradients

    return call


def prepare_step(prepare: PrepareForward, case: MoeBackwardCase, inputs: MoeGradientInputs) -> Call:
    """Both passes in every call, from the routing weights as they are: what rounds them belongs to the call."""
    import torch

    from cudadent42.operations.moe_backward.inputs import differentiated

    leaves = inputs.leaves
    _require_gradient(prepare(case, leaves)())
    wanted, gradient = differentiated(leaves), inputs.output_gradient

    def call() -> Tensor:
        output = prepare(case, leaves)()
        gradients: Tensor = torch.autograd.grad(output, wanted, gradient)  # type: ignore[assignment]
        return gradients

    return call


def prepare_recomputing(case: MoeCase, inputs: MoeInputs) -> Call:
    from flashmoe_science import fused_moe

    return partial(fused_moe, *inputs.tensors, activation=case.activation, recompute=True, **inputs.options)


RECOMPUTING = Implementation(
    "cudadent42_recompute",
    "flashmoe_science.fused_moe(recompute=True): no projections are kept, and the backward pass computes them again",
    ("cpu", "cuda"),
    prepare_recomputing,
    operation=MoeBackwardCase.operation,
)


def _require_gradient(output: Tensor) -> None:
    if not output.requires_grad:
        raise UnsupportedCaseError("its output has no gradient")


def prepare_with(operation: str, prepare: PrepareForward) -> Prepare:
    """What is timed of a forward pass that can be differentiated, for one of the two operations."""
    way = {
        MoeBackwardCase.operation: prepare_backward,
        MoeTrainingStepCase.operation: prepare_step,
    }[operation]
    return partial(way, prepare)


def _graph_is_kept() -> AbstractContextManager[object]:
    """What torch.compile saves for a backward pass is overwritten by it, unless it is told that the graph is kept."""
    from torch._functorch import config

    kept: AbstractContextManager[object] = config.patch(donated_buffer=False)
    return kept


def implementations(operation: str) -> tuple[Implementation, ...]:
    """Those of the forward pass that have gradients, and ours as it recomputes the projections."""
    differentiable = [item for item in forward.ALL if item.name != forward.WIDE]
    context = _graph_is_kept if operation == MoeBackwardCase.operation else nullcontext
    return tuple(
        replace(
            item,
            prepare=prepare_with(operation, item.prepare),
            operation=operation,
            variants=None,
            context=context,
        )
        for item in (*differentiable, RECOMPUTING)
    )
