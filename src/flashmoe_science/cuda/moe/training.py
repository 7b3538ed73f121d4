"""The mixture of experts on CUDA for training: the fused forward pass, and a backward pass of PyTorch's operations.

There are no kernels for the backward pass yet. The forward keeps no z, so that its projections are computed twice.
"""

from __future__ import annotations

import torch

from flashmoe_science.cuda.moe.forward import forward as fused_forward
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_composition import backward

__all__ = ["backward", "forward", "keeps_z"]

keeps_z = False


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
    """See `flashmoe_science.moe_gradients.MoeTrainingForward`: without z, and without biases."""
    assert w13_bias is None
    assert w2_bias is None
    output = fused_forward(
        hidden_states, w13, w2, topk_weights, topk_ids, activation=activation, w13_layout=w13_layout
    )
    return output, None
