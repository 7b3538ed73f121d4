"""The routers of mixtures: scores, choice and renormalisation in one kernel, for experts that are the kernels' too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from flashmoe_science.huggingface.experts import EXACT_WEIGHTS
from flashmoe_science.huggingface.instances import is_hooked, replace_forward
from flashmoe_science.moe import topk_routing
from flashmoe_science.moe_arguments import Scores
from flashmoe_science.routing_composition import topk as composed_topk
from flashmoe_science.takeover.availability import REFUSALS, failed, why_no_routing
from flashmoe_science.takeover.counts import Entry, count


@dataclass(frozen=True)
class _Family:
    """Classes whose routers compute alike, and return logits, weights and ids."""

    classes: frozenset[str]
    parts: frozenset[str]
    """Names of their parameters and buffers."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    exact: bool = False
    """Whether tokens and weights are cast to float32 before their product, and the choice's weights stay so."""
    settings: tuple[str, ...] = ("top_k", "hidden_dim")
    """Attributes that say how they choose."""


_BIAS = "bias"
_CORRECTION = "e_score_correction_bias"
_PLAIN = _Family(
    frozenset(
        f"{name}TopKRouter"
        for name in (
            "FlexOlmo",
            "Mellum",
            "MiniMax",
            "Mixtral",
            "Olmoe",
            "Qwen2Moe",
            "Qwen3Moe",
            "Qwen3Next",
            "Qwen3OmniMoeTalkerText",
            "Qwen3OmniMoeText",
            "Qwen3OmniMoeThinkerText",
            "Qwen3VLMoeText",
            "Qwen3_5Moe",
            "Qwen4ExpText",
        )
    ),
    frozenset({"weight"}),
)
"""The k largest of a softmax over all experts."""
_BIASED = _Family(frozenset({"GptOssTopKRouter"}), frozenset({"weight", _BIAS}))
"""The k largest logits, with a bias, and the softmax of these alone."""
_CORRECTED = _Family(
    frozenset(
        f"{name}TopkRouter"
        for name in (
            "AXK1",
            "BailingHybrid",
            "DeepseekV3",
            "DeepseekV32",
            "Dots1",
            "Dots3NoteText",
            "ExaoneMoe",
            "Glm4Moe",
            "Glm4MoeLite",
            "Glm4vMoeText",
            "Glm5NextText",
            "GlmMoeDsa",
            "HYV4",
            "KimiLinear",
            "MiMoV2Flash",
            "NemotronH",
            "SolarOpen",
        )
    ),
    frozenset({"weight", _CORRECTION}),
    scores="sigmoid",
    exact=True,
    settings=("top_k", "hidden_dim", "routed_scaling_factor", "num_group", "topk_group", "norm_topk_prob"),
)
"""The k largest of a sigmoid and a correction, from the best groups of experts (DeepSeek-V3)."""
_FAMILIES = {name: family for family in (_PLAIN, _BIASED, _CORRECTED) for name in family.classes}
_MOST_EXPERTS = 1024
_MOST_GROUPS = 32
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PROBES = 16
"""Tokens on which the kernel's choice is compared with the class's own."""
_ATTRIBUTE = "_cudadent42_routing"
_devices = ("cuda",)
"""Where one kernel does it. On a CPU the class's own code stays: what the kernel gains there was not measured."""
_failures: dict[tuple[str, torch.dtype], str] = {}


@dataclass(frozen=True)
class Routing:
    """What a router that was taken keeps beside its parameters."""

    config: Any
    """That of its experts, which names their implementation: another one there, and the router is the library's."""
    implementation: str
    family: _Family
    options: dict[str, Any]
    """Of `topk_routing`, but for the correction."""


def _routing_of(router: Any, config: Any, implementation: str) -> Routing:
    family = _FAMILIES[type(router).__name__]
    options: dict[str, Any] = {"renormalize": bool(getattr(router, "norm_topk_prob", True))}
    if family.scores != "softmax":
        options |= {
            "scores": family.scores,
            "scaling_factor": float(router.routed_scaling_factor),
            "groups": int(router.num_group),
            "top_groups": int(router.topk_group),
        }
    return Routing(config, implementation, family, options)


def take(router: torch.nn.Module, experts: Any, implementation: str) -> str | None:
    """Let the kernel choose the experts, where the tokens are on a GPU; None if it does, else why not.

    What it then returns has float32 weights and int32 ids, as the kernels of the experts take them: `experts_forward`
    gives the library's own implementations the library's types.
    """
    if hasattr(router, _ATTRIBUTE) and is_hooked(router, forward):
        return None  # since it was taken, and the hook calls it
    reason = _why_not(router, experts)
    if reason is not None:
        return reason
    routing = _routing_of(router, experts.config, implementation)
    dtype = _dtype_where_alike(router, routing)
    if dtype is None:
        return "its class chooses otherwise in this version of transformers"
    setattr(router, _ATTRIBUTE, routing)
    parameters = {each.dtype for each in router.parameters()}
    exact = routing.family.exact or (dtype is torch.float32 and torch.float32 not in parameters)
    setattr(experts, EXACT_WEIGHTS, exact)
    replace_forward(router, forward)
    return None


def forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In place of a router's own.

    Args:
        hidden_states: (..., hidden).

    Returns:
        logits (tokens, experts), weights (tokens, k), ids (tokens, k).
    """
    routing: Routing = getattr(self, _ATTRIBUTE)
    if (
        routing.config._experts_implementation == routing.implementation
        and hidden_states.device.type in _devices
    ):
        result = _attempt(self, hidden_states, routing)
        if not isinstance(result, str):
            count(Entry.HUGGING_FACE_ROUTER, None)
            return result
        count(Entry.HUGGING_FACE_ROUTER, result)
    own: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = type(self).forward(self, hidden_states)
    return own


def _attempt(
    router: Any, hidden_states: torch.Tensor, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | str:
    """The result, or why not."""
    logits = _logits(router, hidden_states.reshape(-1, router.hidden_dim), routing.family)
    if type(logits) is not torch.Tensor or logits.dtype not in _DTYPES:
        return "logits of another form"
    kind = hidden_states.device.type
    correction = _correction(router, routing.family)
    if is_dynamo_compiling():
        failure = why_no_routing(kind, logits.dtype)
        if failure is not None:
            return failure
        return logits, *topk_routing(logits, router.top_k, correction_bias=correction, **routing.options)
    if (kind, logits.dtype) in _failures:
        return _failures[kind, logits.dtype]
    try:
        return logits, *topk_routing(logits, router.top_k, correction_bias=correction, **routing.options)
    except REFUSALS as error:
        return failed(_failures, (kind, logits.dtype), error)


def _correction(router: Any, family: _Family) -> torch.Tensor | None:
    """(experts,) float32."""
    if _CORRECTION not in family.parts:
        return None
    correction: torch.Tensor = getattr(router, _CORRECTION)
    return correction.float()


def _logits(router: Any, tokens: torch.Tensor, family: _Family) -> torch.Tensor:
    """(tokens, experts)."""
    if family.exact:
        return functional.linear(tokens.float(), router.weight.float())
    return functional.linear(tokens, router.weight, router.bias if _BIAS in family.parts else None)


def _why_not(router: torch.nn.Module, experts: Any) -> str | None:
    family = _FAMILIES.get(type(router).__name__)
    if family is None:
        return "a router of another kind"
    if is_hooked(router, forward):
        return "a router that somebody else's hook calls"
    if getattr(experts, "_is_expert_parallel", False):
        return "experts on several machines"
    weight = getattr(router, "weight", None)
    parts = [name for name, _ in (*router.named_parameters(), *router.named_buffers())]
    if family.parts != set(parts) or type(weight) is not torch.nn.Parameter or weight.dim() != 2:
        return "a router of another form"
    if any(not isinstance(getattr(router, name, None), int | float) for name in family.settings):
        return "a router of another form"
    if weight.shape[0] > _MOST_EXPERTS:
        return f"more than {_MOST_EXPERTS:,} experts"
    if getattr(router, "num_group", 1) > _MOST_GROUPS:
        return f"more than {_MOST_GROUPS} groups of experts"
    if weight.is_meta:
        return "a router without memory"
    return None


@torch.no_grad()
def _dtype_where_alike(router: Any, routing: Routing) -> torch.dtype | None:
    """That of the weights that the class's own code gives, if it chooses the same experts with the same weights on
    tokens drawn at random; else None.
    """
    weight = router.weight
    device = "cpu" if weight.device.type not in ("cpu", "cuda") else weight.device
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = torch.randn(_PROBES, weight.shape[1], generator=generator, dtype=torch.float32, device="cpu").to(
        device, weight.dtype
    )
    try:
        logits, weights, ids = type(router).forward(router, tokens)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    choice = _PROBES, router.top_k
    if logits.shape != (_PROBES, weight.shape[0]) or ids.shape != choice or weights.shape != choice:
        return None
    if not torch.equal(logits, _logits(router, tokens, routing.family)):
        return None
    correction = _correction(router, routing.family)
    exact = logits.double()
    scores = exact.softmax(-1) if routing.family.scores == "softmax" else exact.sigmoid()
    ranks = scores if correction is None else scores + correction
    options = routing.options | {"scores": Scores(routing.family.scores)}
    _, ours = composed_topk(logits, router.top_k, correction_bias=correction, **options)
    # Of equal ranks any may be chosen.
    one, other = (ranks.gather(1, each.long()).sort(dim=-1).values for each in (ids, ours))
    expected = scores.gather(1, ids.long())
    if options["renormalize"]:
        expected = expected / expected.sum(-1, keepdim=True)
    precision = torch.finfo(weights.dtype).eps
    scaled = expected * options.get("scaling_factor", 1.0)
    alike = torch.allclose(one, other, rtol=1e-6, atol=0) and torch.allclose(
        weights.double(), scaled, rtol=4 * precision, atol=0
    )
    return weights.dtype if alike else None
