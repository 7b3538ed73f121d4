"""One call that gives a model of transformers what it can use, and says what it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from flashmoe_science.arguments import HEAD_DIM_STEP, MAX_HEAD_DIM
from flashmoe_science.errors import InputError
from flashmoe_science.huggingface.experts import activation_of, why_not_weights
from flashmoe_science.huggingface.registration import IMPLEMENTATION
from flashmoe_science.takeover.availability import why_no_expert_gradients


@dataclass(frozen=True)
class Acceleration:
    """What `accelerate` set. `str()` gives a line for each part. What single calls do, `report` counts."""

    attention: tuple[str, ...]
    """Classes of the models, parts of models among them, whose attention goes to the kernels."""
    experts: tuple[str, ...]
    """Classes of the mixtures whose experts do."""
    left: tuple[tuple[str, str], ...]
    """What stays with the library's own implementation, and why. A class can also be above, if only some calls stay."""

    def __str__(self) -> str:
        lines = [f"attention of {name}: taken" for name in self.attention]
        lines += [f"experts of {name}: taken" for name in self.experts]
        lines += [f"{name}: left, {reason}" for name, reason in self.left]
        return "\n".join(lines)


def accelerate(model: Any) -> Acceleration:
    """Give a transformers model the kernels for attention and experts, as far as they go.

    The model is changed in place; ``model.set_attn_implementation("sdpa")`` and
    ``model.set_experts_implementation("grouped_mm")`` undo it. Training, generation, PEFT and Trainer need no more.

    Args:
        model: a ``transformers.PreTrainedModel``.

    Raises:
        InputError: it is no such model.
    """
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"model is a {type(model).__name__}; expected one of transformers: "
            "for others there is `with flashmoe_science.sdpa():`"
        )
    left: dict[tuple[str, str], None] = {}
    attention = _set_attention(model, left)
    experts = _set_experts(model, left)
    return Acceleration(tuple(attention), tuple(experts), tuple(left))


def _set_attention(model: PreTrainedModel, left: dict[tuple[str, str], None]) -> dict[str, None]:
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    refusals = {type(part).__name__: _why_not_attention(part) for part in parts}
    if refusals[type(model).__name__] is None and not any(refusals.values()):
        model.set_attn_implementation(IMPLEMENTATION)
    else:
        # A part that cannot must not keep its neighbours from it.
        for part in parts:
            if refusals[type(part).__name__] is None and _owns_its_configuration(part, parts, refusals):
                part.config._attn_implementation_internal = IMPLEMENTATION
    taken: dict[str, None] = {}
    for part in parts:
        name = type(part).__name__
        reason = refusals[name]
        if reason is not None:
            left[name, reason] = None
        elif part.config._attn_implementation == IMPLEMENTATION:
            taken[name] = None
    for layer in model.modules():
        for reason in _notes(layer):
            left[type(layer).__name__, reason] = None
    return taken


def _owns_its_configuration(
    part: PreTrainedModel, parts: list[PreTrainedModel], refusals: dict[str, str | None]
) -> bool:
    """Whether no part that cannot shares the configuration."""
    return not any(other.config is part.config and refusals[type(other).__name__] for other in parts)


def _why_not_attention(part: PreTrainedModel) -> str | None:
    if not part._can_set_attn_implementation():
        return "it does not use the library's attention interface"
    if any(isinstance(getattr(layer, "sinks", None), torch.Tensor) for layer in part.modules()):
        return "attention sinks"
    if not part._supports_sdpa:
        return "the library says that scaled_dot_product_attention cannot compute its attention"
    return None


def _notes(layer: torch.nn.Module) -> list[str]:
    """What of a layer of attention stays, as far as its attributes say."""
    if not hasattr(layer, "scaling") and not hasattr(layer, "is_causal"):
        return []
    notes = []
    query_dim, value_dim = getattr(layer, "qk_head_dim", None), getattr(layer, "v_head_dim", None)
    head_dim = getattr(layer, "head_dim", None)
    if query_dim is not None and value_dim is not None and query_dim != value_dim:
        notes.append("head_dim of value differs")
    elif isinstance(head_dim, int) and (head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_STEP):
        notes.append(f"head_dim no multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}")
    dropout = getattr(layer, "attention_dropout", getattr(layer, "dropout", 0))
    probability = getattr(dropout, "p", dropout)
    if isinstance(probability, float) and probability > 0:
        notes.append("dropout of attention, in training")
    if isinstance(getattr(layer, "sliding_window", None), int):
        notes.append("texts longer than its window")
    return notes


def _set_experts(model: PreTrainedModel, left: dict[tuple[str, str], None]) -> dict[str, None]:
    mixtures = [each for each in model.modules() if hasattr(each, "_is_expert_parallel")]
    taken: dict[str, None] = {}
    for experts in mixtures:
        reason = why_not_weights(experts)
        if reason is not None:
            left[type(experts).__name__, reason] = None
        else:
            taken[type(experts).__name__] = None
            activation = activation_of(experts)
            assert activation is not None  # else it was left
            weight = experts.down_proj
            lacking = why_no_expert_gradients(weight.device.type, weight.dtype, activation)
            if lacking is not None:
                left[type(experts).__name__, f"where a gradient is needed: {lacking}"] = None
    if taken:
        model.set_experts_implementation(IMPLEMENTATION)
    return taken
