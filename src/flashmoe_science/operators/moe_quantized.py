"""``torch.ops.flashmoe_science.fused_moe_quantized``."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.cpu import moe_quantized as cpu
from flashmoe_science.moe_arguments import Activation, W13Layout, parse_choice, reject_moe_gradients
from flashmoe_science.operators.flops import Shape
from flashmoe_science.operators.library import define
from flashmoe_science.operators.recording import below_autograd, reject_tangents
from flashmoe_science.quantized import check_quantized_arguments


def _forward(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_scales: torch.Tensor,
    w2_scales: torch.Tensor,
    activation: str = "silu",
    w13_layout: str = "concat",
) -> torch.Tensor:
    """On CUDA tensors, too: the check says that there is no kernel."""
    return cpu.forward(
        hidden_states,
        w13,
        w2,
        topk_weights,
        topk_ids,
        w13_scales,
        w2_scales,
        activation=parse_choice(Activation, activation, "activation"),
        w13_layout=parse_choice(W13Layout, w13_layout, "w13_layout"),
    )


def _fake(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_scales: torch.Tensor,
    w2_scales: torch.Tensor,
    activation: str = "silu",
    w13_layout: str = "concat",
) -> torch.Tensor:
    kind = parse_choice(Activation, activation, "activation")
    parse_choice(W13Layout, w13_layout, "w13_layout")
    check_quantized_arguments(hidden_states, w13, w2, topk_weights, topk_ids, w13_scales, w2_scales, kind)
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


def _recorded(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_scales: torch.Tensor,
    w2_scales: torch.Tensor,
    activation: str = "silu",
    w13_layout: str = "concat",
) -> torch.Tensor:
    floats = {
        "hidden_states": hidden_states,
        "topk_weights": topk_weights,
        "w13_scales": w13_scales,
        "w2_scales": w2_scales,
    }
    reject_tangents("fused_moe", *floats.values())
    reject_moe_gradients(**floats)
    result: torch.Tensor = below_autograd(
        FUSED_MOE_QUANTIZED,
        hidden_states,
        w13,
        w2,
        topk_weights,
        topk_ids,
        w13_scales,
        w2_scales,
        activation,
        w13_layout,
    )
    return result


def _flops(
    hidden_states: Shape,
    w13: Shape,
    w2: Shape,
    topk_weights: Shape,
    topk_ids: Shape,
    *options: Any,
    **named: Any,
) -> int:
    """As `moe_rules.forward_flops`; sizes of packed weights are taken from the tokens and the rows."""
    tokens, chosen = topk_ids
    hidden = hidden_states[1]
    intermediate = w2[2] * hidden // w13[2]
    return 2 * tokens * chosen * hidden * (w13[1] + intermediate)


FUSED_MOE_QUANTIZED = define(
    "fused_moe_quantized(Tensor hidden_states, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids,"
    ' Tensor w13_scales, Tensor w2_scales, str activation="silu", str w13_layout="concat") -> Tensor',
    cpu=_forward,
    cuda=_forward,
    fake=_fake,
    recorded=_recorded,
    flops=_flops,
    sharding=None,
)
"""`flashmoe_science.fused_moe` with scales, into a new tensor; arguments, result and errors as there."""
