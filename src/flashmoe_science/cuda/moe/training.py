"""The mixture of experts on CUDA for training: the kernels' passes where they take a call (`cuda.moe.gradients`), else
the fused forward pass, which keeps no z then, and a backward pass of PyTorch's operations.
"""

from __future__ import annotations

import torch

from flashmoe_science.cuda.moe import gradients
from flashmoe_science.cuda.moe.forward import forward as fused_forward
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_composition import backward as composed_backward
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
    """See `flashmoe_science.moe_gradients.MoeBackend`: where the kernels of the backward pass take it."""
    return gradients.can_differentiate(
        hidden_states, w13, w2, topk_ids, activation=activation, w13_layout=w13_layout
    )


def forward(
    tensors: MoeTensors, *, activation: Activation, w13_layout: W13Layout, keep_z: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `flashmoe_science.moe_gradients.MoeTrainingForward`."""
    hidden_states, w13, w2, _, topk_ids, w13_bias, w2_bias = tensors
    if keep_z and keeps_z(hidden_states, w13, w2, topk_ids, activation=activation, w13_layout=w13_layout):
        return gradients.forward_keeping(
            *tensors.five,
            activation=activation,
            w13_layout=w13_layout,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
        )
    output = fused_forward(
        *tensors.five, activation=activation, w13_layout=w13_layout, w13_bias=w13_bias, w2_bias=w2_bias
    )
    return output, None


def backward(
    grad_output: torch.Tensor,
    tensors: MoeTensors,
    z: torch.Tensor | None,
    *,
    activation: Activation,
    w13_layout: W13Layout,
    needs: MoeNeeds,
    main: MainGradients = NO_MAIN_GRADIENTS,
) -> MoeGradients:
    """See `flashmoe_science.moe_gradients.MoeBackend`.

    z goes back to the kernels that kept it, whatever an environment variable says by now: the order of its columns is
    theirs.
    """
    given = tensors.contiguous()
    hidden_states, w13, w2, _, topk_ids, w13_bias, w2_bias = given
    described = hidden_states, w13, w2, topk_ids
    if (
        z is None
        and not keeps_z(*described, activation=activation, w13_layout=w13_layout)
        and not gradients.can_project_again(*described, activation=activation, w13_layout=w13_layout)
    ):
        composed = composed_backward(
            grad_output, given, None, activation=activation, w13_layout=w13_layout, needs=needs
        )
        return main.take(composed)
    kept = None if z is None else z.contiguous()
    return gradients.backward(
        grad_output,
        *given.five,
        kept,
        activation=activation,
        w13_layout=w13_layout,
        needs=needs,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        main=main,
    )
