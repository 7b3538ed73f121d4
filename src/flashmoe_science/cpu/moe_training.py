"""The mixture of experts on the CPU for training: the fused forward pass, which keeps z, and the backward pass."""

from __future__ import annotations

import torch

from flashmoe_science.cpu import moe, moe_backward
from flashmoe_science.cpu.library import CPU
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_gradients import (
    NO_MAIN_GRADIENTS,
    MainGradients,
    MoeGradients,
    MoeNeeds,
    MoeTensors,
)

__all__ = ["backward", "forward", "keeps_z"]


def keeps_z(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: Activation,
    w13_layout: W13Layout,
) -> bool:
    """See `flashmoe_science.moe_gradients.MoeBackend`: always."""
    return True


def forward(
    tensors: MoeTensors, *, activation: Activation, w13_layout: W13Layout, keep_z: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `flashmoe_science.moe_gradients.MoeTrainingForward`."""
    z = None
    if keep_z:
        shape = tensors.topk_ids.numel(), tensors.w13.shape[1]
        z = torch.empty(shape, dtype=tensors.hidden_states.dtype, device=CPU)
    output = moe.forward(
        *tensors.five,
        activation=activation,
        w13_layout=w13_layout,
        w13_bias=tensors.w13_bias,
        w2_bias=tensors.w2_bias,
        z=z,
    )
    return output, z


def backward(
    grad_output: torch.Tensor,
    tensors: MoeTensors,
    z: torch.Tensor | None,
    *,
    activation: Activation,
    w13_layout: W13Layout,
    needs: MoeNeeds,
    main: MainGradients = NO_MAIN_GRADIENTS,
    instruction_set: InstructionSet | None = None,
) -> MoeGradients:
    """See `flashmoe_science.moe_gradients.MoeBackward` and `flashmoe_science.cpu.moe_backward.backward`."""
    gradients = moe_backward.backward(
        grad_output,
        tensors,
        z,
        activation=activation,
        w13_layout=w13_layout,
        needs=needs,
        instruction_set=instruction_set,
    )
    return main.take(gradients)
