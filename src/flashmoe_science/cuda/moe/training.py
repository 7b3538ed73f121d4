"""The mixture of experts on CUDA for training: the kernels' passes where they take a call (`cuda.moe.gradients`), else
the fused forward pass, which keeps no z then, and a backward pass of PyTorch's operations.
"""

from __future__ import annotations

import torch

from flashmoe_science.cuda.moe import gradients
from flashmoe_science.cuda.moe.forward import forward as fused_forward
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_composition import backward as composed_backward
from flashmoe_science.moe_gradients import MoeGradients, MoeNeeds

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
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    *,
    activation: Activation,
    w13_layout: W13Layout,
    keep_z: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `flashmoe_science.moe_gradients.MoeTrainingForward`: without biases."""
    assert w13_bias is None
    assert w2_bias is None
    if keep_z and keeps_z(hidden_states, w13, w2, topk_ids, activation=activation, w13_layout=w13_layout):
        return gradients.forward_keeping(
            hidden_states, w13, w2, topk_weights, topk_ids, activation=activation, w13_layout=w13_layout
        )
    output = fused_forward(
        hidden_states, w13, w2, topk_weights, topk_ids, activation=activation, w13_layout=w13_layout
    )
    return output, None


def backward(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    z: torch.Tensor | None,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    *,
    activation: Activation,
    w13_layout: W13Layout,
    needs: MoeNeeds,
) -> MoeGradients:
    """See `flashmoe_science.moe_gradients.MoeBackend`.

    z goes back to the kernels that kept it, whatever an environment variable says by now: the order of its columns is
    theirs.
    """
    # Tensors that hooks saved and restored need not have the forward's strides.
    hidden_states, w13, w2, topk_weights, topk_ids = (
        tensor.contiguous() for tensor in (hidden_states, w13, w2, topk_weights, topk_ids)
    )
    tensors = hidden_states, w13, w2, topk_weights, topk_ids
    biased = w13_bias is not None or w2_bias is not None
    if biased or (
        z is None
        and not keeps_z(hidden_states, w13, w2, topk_ids, activation=activation, w13_layout=w13_layout)
    ):
        return composed_backward(
            grad_output,
            *tensors,
            None,
            w13_bias,
            w2_bias,
            activation=activation,
            w13_layout=w13_layout,
            needs=needs,
        )
    kept = None if z is None else z.contiguous()
    return gradients.backward(
        grad_output, *tensors, kept, activation=activation, w13_layout=w13_layout, needs=needs
    )
