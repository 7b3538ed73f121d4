"""The gradients of this project's experts with one of them left out, to see what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cudadent42.operations.interface import WHOLE, Parts
from cudadent42.operations.moe_backward.case import MoeBackwardCase, MoeTrainingStepCase
from cudadent42.operations.moe_backward.inputs import MoeGradientInputs, differentiated

if TYPE_CHECKING:
    from torch import Tensor

    from cudadent42.model.implementations import Call

_LEFT_OUT = {
    WHOLE: (),
    "token_gradient": ("hidden_states",),
    "weight_gradients": ("w13", "w2"),
    "routing_gradient": ("topk_weights",),
}
"""What needs no gradient, by the part's name."""


def without(case: MoeBackwardCase, inputs: MoeGradientInputs) -> Parts:
    """All gradients, and all but some. None is wrong: what is not asked for is not computed."""
    return Parts({part: _gradients(case, inputs, names) for part, names in _LEFT_OUT.items()})


def _gradients(case: MoeBackwardCase, inputs: MoeGradientInputs, left_out: tuple[str, ...]) -> Call:
    from flashmoe_science import fused_moe

    leaves = inputs.leaves
    leaves = replace(leaves, **{name: getattr(leaves, name).detach() for name in left_out})
    if "w13" in left_out and leaves.biases is not None:
        first, second = leaves.biases
        leaves = replace(leaves, biases=(first.detach(), second.detach()))
    wanted = [tensor for tensor in differentiated(leaves) if tensor.requires_grad]
    tensors, options, gradient = leaves.tensors, leaves.options, inputs.output_gradient
    if isinstance(case, MoeTrainingStepCase):

        def step() -> Tensor:
            output = fused_moe(*tensors, activation=case.activation, **options)
            return torch.autograd.grad(output, wanted, gradient)[0]

        return step
    output = fused_moe(*tensors, activation=case.activation, **options)
    return lambda: torch.autograd.grad(output, wanted, gradient, retain_graph=True)[0]
