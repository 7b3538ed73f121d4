"""One call that gives a model of transformers what it can use, and says what it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from flashmoe_science.arguments import HEAD_DIM_STEP, MAX_HEAD_DIM
from flashmoe_science.errors import InputError
from flashmoe_science.huggingface import norms as rms_norms
from flashmoe_science.huggingface import rotations as rotary
from flashmoe_science.huggingface.registration import IMPLEMENTATION
from flashmoe_science.huggingface.routers import take
from flashmoe_science.huggingface.weights import TRANSPOSED, holds_experts, layer_of, turn
from flashmoe_science.takeover.availability import why_no_expert_gradients


@dataclass(frozen=True)
class Acceleration:
    """What `accelerate` set. `str()` gives a line for each part. What single calls do, `report` counts."""

    attention: tuple[str, ...]
    """Classes of the models, parts of models among them, whose attention goes to the kernels."""
    experts: tuple[str, ...]
    """Classes of the mixtures whose experts do."""
    routers: tuple[str, ...]
    """Classes of the routers whose choice of experts does, where the tokens are on a GPU."""
    norms: tuple[str, ...]
    """Classes of the RMS norms that go to PyTorch's kernel, where their input is on a GPU."""
    rotations: tuple[str, ...]
    """Classes of the layers whose rotation of queries and keys goes to the kernel, where these are on a GPU."""
    left: tuple[tuple[str, str], ...]
    """What stays with the library's own implementation, and why. A class can also be above, if only some calls stay."""

    def __str__(self) -> str:
        lines = [f"attention of {name}: taken" for name in self.attention]
        lines += [f"experts of {name}: taken" for name in self.experts]
        lines += [f"choice of {name}: taken on GPUs" for name in self.routers]
        lines += [f"{name}: taken on GPUs" for name in self.norms]
        lines += [f"rotation of {name}: taken on GPUs" for name in self.rotations]
        lines += [f"{name}: left, {reason}" for name, reason in self.left]
        return "\n".join(lines)


def accelerate(model: Any, *, norms: bool = True, rotations: bool = True) -> Acceleration:
    """Give a transformers model the kernels for attention and experts, and one for each RMS norm and rotation.

    The model is changed in place; ``model.set_attn_implementation("sdpa")`` and
    ``model.set_experts_implementation("grouped_mm")`` undo it. Training, generation, PEFT and Trainer need no more.
    Where a mixture's experts are taken, so is its router's softmax and choice, which names alone do not reach. Beside
    attention or experts that are taken, RMS norms on a GPU are PyTorch's one kernel (`torch.nn.functional.rms_norm`),
    where the library runs eight, and queries and keys are turned by their positions in one kernel, where it runs ten.
    Both round less often. Under torch.compile, which fuses them, both stay as they are. Weights that a model holds
    transposed (GPT-OSS) get other strides, once; their shapes and numbers stay.

    Args:
        model: a ``transformers.PreTrainedModel``.
        norms: False leaves RMS norms to the library, or gives them back to it.
        rotations: False leaves rotations to it, or gives them back.

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
    routers = _set_routers(model, experts, left)
    for module in model.modules():
        if not norms:
            rms_norms.give_back(module)
        if not rotations:
            rotary.give_back(module)
    normed = _set_norms(model, left) if norms and (attention or experts) else {}
    rotated = _set_rotations(model, left) if rotations and (attention or experts) else {}
    return Acceleration(
        tuple(attention), tuple(experts), tuple(routers), tuple(normed), tuple(rotated), tuple(left)
    )


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
    causal = all(getattr(layer, "is_causal", True) for layer in part.modules())
    if not part._supports_sdpa and not (
        causal and getattr(part.config, "model_type", None) in _MORE_THAN_SDPA
    ):
        return "the library says that scaled_dot_product_attention cannot compute its attention"
    return None


_MORE_THAN_SDPA = ("gemma2", "gpt_oss")
"""Types of models that the library's SDPA lacks nothing for but a soft cap or sinks, which the kernels have."""


def _has_sinks(layer: torch.nn.Module) -> bool:
    return isinstance(getattr(layer, "sinks", None), torch.Tensor)


def _has_cap(layer: torch.nn.Module) -> bool:
    return isinstance(getattr(layer, "attn_logit_softcapping", None), float)


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
        notes.append("texts longer than its window, with padding or compiled")
    if _has_sinks(layer):
        notes.append("texts with padding, for its sinks")
    if _has_cap(layer):
        notes.append("texts with padding, for its soft cap")
    return notes


def _set_experts(model: PreTrainedModel, left: dict[tuple[str, str], None]) -> dict[str, None]:
    mixtures = [each for each in model.modules() if holds_experts(each)]
    taken: dict[str, None] = {}
    for experts in mixtures:
        name = type(experts).__name__
        layer = layer_of(experts)
        if layer == TRANSPOSED:
            layer = turn(experts) or layer_of(experts)
        if isinstance(layer, str):
            left[name, layer] = None
            continue
        taken[name] = None
        lacking = why_no_expert_gradients(
            layer.w13.device.type, layer.w13.dtype, layer.activation, layer.layout
        )
        if lacking is not None:
            left[name, f"where a gradient is needed: {lacking}"] = None
    if taken:
        model.set_experts_implementation(IMPLEMENTATION)
    return taken


def _set_routers(
    model: PreTrainedModel, experts: dict[str, None], left: dict[tuple[str, str], None]
) -> dict[str, None]:
    """Those that stand beside experts that were taken."""
    taken: dict[str, None] = {}
    for block in model.modules():
        children = list(block.children())
        mixture = next((child for child in children if type(child).__name__ in experts), None)
        router = next((child for child in children if type(child).__name__.lower().endswith("router")), None)
        if mixture is None or router is None:
            continue
        name = type(router).__name__
        reason = take(router, mixture, IMPLEMENTATION)
        if reason is None:
            taken[name] = None
        else:
            left[name, reason] = None
    return taken


def _set_norms(model: PreTrainedModel, left: dict[tuple[str, str], None]) -> dict[str, None]:
    taken: dict[str, None] = {}
    alike: dict[rms_norms.Kind, bool] = {}
    for part, norm in _with_parts(model, model):
        if not rms_norms.is_norm(norm):
            continue
        name = type(norm).__name__
        reason = rms_norms.take(norm, part.config, IMPLEMENTATION, alike=alike)
        if reason is None:
            taken[name] = None
        else:
            left[name, reason] = None
    return taken


def _set_rotations(model: PreTrainedModel, left: dict[tuple[str, str], None]) -> dict[str, None]:
    taken: dict[str, None] = {}
    for part, layer in _with_parts(model, model):
        if not rotary.rotates(layer):
            continue
        name = type(layer).__name__
        reason = rotary.take(layer, part.config, IMPLEMENTATION)
        if reason is None:
            taken[name] = None
        else:
            left[f"rotation of {name}", reason] = None
    return taken


def _with_parts(
    module: torch.nn.Module, part: PreTrainedModel
) -> Iterator[tuple[PreTrainedModel, torch.nn.Module]]:
    """Every module, and the innermost model that it belongs to."""
    part = module if isinstance(module, PreTrainedModel) else part
    yield part, module
    for child in module.children():
        yield from _with_parts(child, part)
