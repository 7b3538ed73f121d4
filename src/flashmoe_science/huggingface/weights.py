"""The experts of transformers' mixtures as `fused_moe` takes them: weights, biases, activation and layout."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers.integrations.moe import _default_apply_gate

from flashmoe_science.moe_arguments import SIZE_STEP, SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT
from flashmoe_science.takeover.tracing import constant_result

_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}
_GATED = {"SiLUActivation": "silu", "SiLU": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh"}
"""By the class of the activation."""
_OWN_GATE = "a gate of the model's own"
TRANSPOSED = "transposed weights of experts, which flashmoe_science.accelerate turns"
_PROBES = (-9.0, -7.0, -1.5, 0.0, 0.5, 3.0, 7.0, 9.0)
"""Projections on both sides of GPT-OSS's limits."""


class Layer(NamedTuple):
    """What a module of experts holds, by the names of `fused_moe`."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    activation: str
    layout: str


def holds_experts(module: torch.nn.Module) -> bool:
    """Whether it is one that transformers' own choice of implementations reaches, in any version."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed")


def layer_of(experts: Any) -> Layer | str:
    """What the module holds, or why the kernels do not take it. Each is asked for by name once: a module looks long.

    What versions of transformers before 5.23 do not say of experts is what all of theirs are.
    """
    if not getattr(experts, "has_gate", True):
        return "experts without a gate"
    if getattr(experts, "has_post_expert_norm", False):
        return "experts with a norm after them"
    gate = _gate_of(experts)
    if isinstance(gate, str):
        return gate
    w13, w2 = experts.gate_up_proj, experts.down_proj
    if w13.dim() != 3 or w2.dim() != 3 or w13.dtype != w2.dtype:
        return "weights of another form"
    transposed = experts.is_transposed
    if transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    _, hidden, intermediate = w2.shape
    if hidden % SIZE_STEP != 0 or intermediate % SIZE_STEP != 0:
        return f"sizes no multiple of {SIZE_STEP}"
    kind = w13.device.type
    if w13.dtype not in _DTYPES.get(kind, ()):
        return f"{str(w13.dtype).removeprefix('torch.')} on {kind}"
    w13_bias = w2_bias = None
    if experts.has_bias:
        w13_bias, w2_bias = experts.gate_up_proj_bias, experts.down_proj_bias
        if not all(each.dtype is w13.dtype and each.is_contiguous() for each in (w13_bias, w2_bias)):
            return "biases of another form"
    if not (w13.is_contiguous() and w2.is_contiguous()):
        return TRANSPOSED if transposed else "weights not contiguous"
    return Layer(w13, w2, w13_bias, w2_bias, *gate)


def _gate_of(experts: Any) -> tuple[str, str] | str:
    """The activation and the layout of w13's rows, or why the kernels have not both."""
    own = type(experts)
    if own._apply_gate is _default_apply_gate:
        activation = _GATED.get(type(experts.act_fn).__name__)
        if not getattr(experts, "is_concatenated", True):
            return _OWN_GATE
        return "another activation" if activation is None else (activation, "concat")
    if (
        getattr(experts, "alpha", None) != SWIGLU_OAI_ALPHA
        or getattr(experts, "limit", None) != SWIGLU_OAI_LIMIT
    ):
        return _OWN_GATE
    layout = _clamped_layout(own)
    return _OWN_GATE if layout is None else ("swigluoai", layout)


@constant_result
def _clamped_layout(own: type) -> str | None:
    return _try_clamped(own)


@functools.cache
def _try_clamped(own: type) -> str | None:
    """The layout in which a class's gate is "swigluoai" with GPT-OSS's constants, by what it makes of a few numbers."""
    numbers = torch.tensor(_PROBES, dtype=torch.float64, device="cpu")
    gate, up = (each.flatten() for each in torch.meshgrid(numbers, numbers, indexing="ij"))
    projections = {"concat": torch.cat((gate, up)), "interleaved": torch.stack((gate, up), dim=1).flatten()}
    bounded = gate.clamp(max=SWIGLU_OAI_LIMIT)
    linear = up.clamp(-SWIGLU_OAI_LIMIT, SWIGLU_OAI_LIMIT) + 1
    expected = linear * bounded * torch.sigmoid(SWIGLU_OAI_ALPHA * bounded)
    stand_in = SimpleNamespace(alpha=SWIGLU_OAI_ALPHA, limit=SWIGLU_OAI_LIMIT)
    for layout, projected in projections.items():
        try:
            result = own._apply_gate(stand_in, projected)  # type: ignore[attr-defined]
        except (AttributeError, TypeError, RuntimeError):
            return None
        if result.shape == expected.shape and torch.allclose(result, expected, rtol=1e-9, atol=1e-12):
            return layout
    return None


@torch.no_grad()
def turn(experts: Any) -> str | None:
    """Lay the weights of transposed experts out as the kernels read them; None, or why they stay.

    The parameters remain the same objects, with the same shapes and numbers: only their strides are others, which the
    library's own implementations take as well. One weight at a time is in memory twice.
    """
    weights = experts.gate_up_proj, experts.down_proj
    for weight in weights:
        if type(weight) is not torch.nn.Parameter:
            return "transposed weights of experts that are no plain parameters"
        if weight.untyped_storage().nbytes() != weight.nbytes:
            return "transposed weights of experts inside a larger tensor"
    for weight in weights:
        weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
    return None
