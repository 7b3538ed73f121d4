"""The mixture of experts on the CPU for training: the fused forward pass, which keeps z, and the backward pass."""

from __future__ import annotations

import torch

from flashmoe_science.cpu import moe
from flashmoe_science.cpu.library import CPU
from flashmoe_science.cpu.moe_backward import backward
from flashmoe_science.moe_arguments import Activation, W13Layout

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
    """See `flashmoe_science.moe_gradients.MoeTrainingForward`; still without biases."""
    assert w13_bias is None
    assert w2_bias is None
    z = None
    if keep_z:
        z = torch.empty((topk_ids.numel(), w13.shape[1]), dtype=hidden_states.dtype, device=CPU)
    output = moe.forward(
        hidden_states, w13, w2, topk_weights, topk_ids, activation=activation, w13_layout=w13_layout, z=z
    )
    return output, z
