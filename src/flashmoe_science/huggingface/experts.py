"""The experts of a mixture as transformers' models call them."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from transformers.integrations.moe import _default_apply_gate, grouped_mm_experts_forward

from flashmoe_science.errors import BuildError, DeviceError, InputError
from flashmoe_science.moe import fused_moe
from flashmoe_science.moe_arguments import SIZE_STEP
from flashmoe_science.takeover.availability import summary, why_no_expert_gradients, why_no_experts
from flashmoe_science.takeover.counts import Entry, count

_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}
_GATED = {"SiLUActivation": "silu", "SiLU": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh"}
"""By the class of the activation."""
_failures: dict[tuple[str, torch.dtype], str] = {}


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The contract of ``transformers.integrations.moe.ExpertsInterface``.

    Args:
        self: the module that holds the experts' weights.
        hidden_states: (tokens, hidden).
        top_k_index: (tokens, k), int64; one past the last expert is that of another rank.
        top_k_weights: (tokens, k).

    Returns:
        (tokens, hidden), like hidden_states.
    """
    result = _attempt(self, hidden_states, top_k_index, top_k_weights)
    if isinstance(result, str):
        count(Entry.HUGGING_FACE_EXPERTS, result)
        declined: torch.Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return declined
    count(Entry.HUGGING_FACE_EXPERTS, None)
    return result


def why_not_weights(experts: Any) -> str | None:
    """Why the kernels do not take these experts, whatever the tokens; None if they do."""
    if not experts.has_gate:
        return "experts without a gate"
    if experts.has_bias:
        return "experts with a bias"
    if experts.is_transposed:
        return "transposed weights of experts"
    if experts.has_post_expert_norm:
        return "experts with a norm behind them"
    if not experts.is_concatenated or type(experts)._apply_gate is not _default_apply_gate:
        return "a gate of the model's own"
    if type(experts.act_fn).__name__ not in _GATED:
        return "another activation"
    w13, w2 = experts.gate_up_proj, experts.down_proj
    if w13.dim() != 3 or w2.dim() != 3 or w13.dtype != w2.dtype:
        return "weights of another form"
    if not (w13.is_contiguous() and w2.is_contiguous()):
        return "weights not contiguous"
    if w2.shape[1] % SIZE_STEP != 0 or w2.shape[2] % SIZE_STEP != 0:
        return f"sizes no multiple of {SIZE_STEP}"
    if w13.dtype not in _DTYPES.get(w13.device.type, ()):
        return f"{str(w13.dtype).removeprefix('torch.')} on {w13.device.type}"
    return None


def why_not_call(experts: Any, hidden_states: torch.Tensor, top_k_weights: torch.Tensor) -> str | None:
    """Why the kernels do not take a call of these experts; None if they do."""
    reason = why_not_weights(experts)
    if reason is not None:
        return reason
    w13, w2 = experts.gate_up_proj, experts.down_proj
    if torch.is_grad_enabled() and (
        hidden_states.requires_grad or w13.requires_grad or w2.requires_grad or top_k_weights.requires_grad
    ):
        reason = why_no_expert_gradients(w13.device.type, w13.dtype, _GATED[type(experts.act_fn).__name__])
        if reason is not None:
            return reason
    if hidden_states.device != w13.device or hidden_states.dim() != 2 or hidden_states.shape[0] == 0:
        return "tokens of another form"
    return None


def activation_of(experts: Any) -> str | None:
    """As `fused_moe` calls it; None for one that it has not."""
    return _GATED.get(type(experts.act_fn).__name__)


def _attempt(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor | str:
    """The result, or why not."""
    reason = why_not_call(experts, hidden_states, top_k_weights)
    if reason is not None:
        return reason
    w13, w2 = experts.gate_up_proj, experts.down_proj
    # As the library's own implementation does where autocast left the tokens in float32.
    tokens = hidden_states.to(w13.dtype).contiguous()
    weights, ids = top_k_weights.float().contiguous(), top_k_index.contiguous()
    activation = _GATED[type(experts.act_fn).__name__]
    if is_dynamo_compiling():
        failure = why_no_experts(w13.device.type, w13.dtype)
        return failure or fused_moe(tokens, w13, w2, weights, ids, activation=activation).to(
            hidden_states.dtype
        )
    kind = w13.device.type, w13.dtype
    if kind in _failures:
        return _failures[kind]
    try:
        output = fused_moe(tokens, w13, w2, weights, ids, activation=activation)
    except InputError:
        return "an argument that the kernel refuses"
    except (DeviceError, BuildError) as error:
        return _failures.setdefault(kind, summary(error))
    return output.to(hidden_states.dtype)
