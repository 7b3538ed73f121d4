"""The experts of a mixture as transformers' models call them."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from transformers.integrations.moe import grouped_mm_experts_forward

from flashmoe_science.huggingface.weights import Layer, layer_of
from flashmoe_science.moe import fused_moe
from flashmoe_science.takeover.availability import REFUSALS, failed, why_no_expert_gradients, why_no_experts
from flashmoe_science.takeover.counts import Entry, count

EXACT_WEIGHTS = "_cudadent42_exact_weights"
"""Attribute of experts whose router, as the library computes it, gives weights in float32 whatever the tokens are."""
_failures: dict[tuple[str, torch.dtype], str] = {}


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The contract of ``transformers.integrations.moe.ExpertsInterface``.

    Args:
        self: the module that holds the experts' weights.
        hidden_states: (tokens, hidden).
        top_k_index: (tokens, k), int64; one past the last expert is that of another rank. A router that `accelerate`
            took gives int32.
        top_k_weights: (tokens, k). From such a router in float32.

    Returns:
        (tokens, hidden), like hidden_states.
    """
    result = _attempt(self, hidden_states, top_k_index, top_k_weights)
    if isinstance(result, str):
        count(Entry.HUGGING_FACE_EXPERTS, result)
        if top_k_index.dtype is torch.int32:
            top_k_index = top_k_index.long()
            if not getattr(self, EXACT_WEIGHTS, False):
                top_k_weights = top_k_weights.to(hidden_states.dtype)
        declined: torch.Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return declined
    count(Entry.HUGGING_FACE_EXPERTS, None)
    return result


def why_not_call(experts: Any, hidden_states: torch.Tensor, top_k_weights: torch.Tensor) -> str | None:
    """Why the kernels do not take a call of these experts; None if they do."""
    layer = layer_of(experts)
    return layer if isinstance(layer, str) else _why_not_tokens(layer, hidden_states, top_k_weights)


def _why_not_tokens(layer: Layer, hidden_states: torch.Tensor, top_k_weights: torch.Tensor) -> str | None:
    w13, w2, w13_bias, w2_bias, activation, layout = layer
    if (
        hidden_states.requires_grad
        or w13.requires_grad
        or w2.requires_grad
        or top_k_weights.requires_grad
        or (w13_bias is not None and w13_bias.requires_grad)
        or (w2_bias is not None and w2_bias.requires_grad)
    ) and torch.is_grad_enabled():
        reason = why_no_expert_gradients(w13.device.type, w13.dtype, activation, layout)
        if reason is not None:
            return reason
    if hidden_states.device != w13.device or hidden_states.dim() != 2 or hidden_states.shape[0] == 0:
        return "tokens of another form"
    return None


def _attempt(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor | str:
    """The result, or why not."""
    layer = layer_of(experts)
    if isinstance(layer, str):
        return layer
    reason = _why_not_tokens(layer, hidden_states, top_k_weights)
    if reason is not None:
        return reason
    w13, w2, w13_bias, w2_bias, activation, layout = layer
    device, dtype = w13.device.type, w13.dtype
    # As the library's own implementation does where autocast left the tokens in float32.
    tokens_dtype = hidden_states.dtype
    tokens = (hidden_states if tokens_dtype is dtype else hidden_states.to(dtype)).contiguous()
    weights = top_k_weights if top_k_weights.dtype is torch.float32 else top_k_weights.float()
    weights, ids = weights.contiguous(), top_k_index.contiguous()
    if is_dynamo_compiling():
        failure = why_no_experts(device, dtype)
        if failure is not None:
            return failure
        output = fused_moe(
            *(tokens, w13, w2, weights, ids),
            activation=activation,
            w13_layout=layout,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
        )
    else:
        kind = device, dtype
        if kind in _failures:
            return _failures[kind]
        try:
            output = fused_moe(
                *(tokens, w13, w2, weights, ids),
                activation=activation,
                w13_layout=layout,
                w13_bias=w13_bias,
                w2_bias=w2_bias,
            )
        except REFUSALS as error:
            return failed(_failures, kind, error)
    return output if output.dtype is tokens_dtype else output.to(tokens_dtype)
