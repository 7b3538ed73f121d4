"""Attention and mixture-of-experts kernels, compiled on this machine at first use."""

import importlib
from typing import TYPE_CHECKING, Any

from flashmoe_science.errors import BuildError, DeviceError, InputError

if TYPE_CHECKING:
    from flashmoe_science.attention import flash_attention
    from flashmoe_science.explanation import explain
    from flashmoe_science.huggingface import accelerate
    from flashmoe_science.moe import fused_moe, topk_routing
    from flashmoe_science.moe_capacity import limit_to_capacity, tokens_per_expert
    from flashmoe_science.moe_layer import MoE
    from flashmoe_science.router_losses import routing_losses, topk_routing_with_losses
    from flashmoe_science.takeover.counts import report, reset_report
    from flashmoe_science.takeover.implementation import register_flash_attention_impl
    from flashmoe_science.takeover.sdpa import disable_sdpa, enable_sdpa, sdpa
    from flashmoe_science.varlen.append import paged_append
    from flashmoe_science.varlen.attention import attention_varlen
    from flashmoe_science.varlen.merge import merge_attention

__all__ = [
    "BuildError",
    "DeviceError",
    "InputError",
    "MoE",
    "accelerate",
    "attention_varlen",
    "disable_sdpa",
    "enable_sdpa",
    "explain",
    "flash_attention",
    "fused_moe",
    "limit_to_capacity",
    "merge_attention",
    "paged_append",
    "register_flash_attention_impl",
    "report",
    "reset_report",
    "routing_losses",
    "sdpa",
    "tokens_per_expert",
    "topk_routing",
    "topk_routing_with_losses",
]

_MODULES = {
    "MoE": "moe_layer",
    "routing_losses": "router_losses",
    "accelerate": "huggingface",
    "attention_varlen": "varlen.attention",
    "disable_sdpa": "takeover.sdpa",
    "enable_sdpa": "takeover.sdpa",
    "explain": "explanation",
    "flash_attention": "attention",
    "fused_moe": "moe",
    "limit_to_capacity": "moe_capacity",
    "merge_attention": "varlen.merge",
    "paged_append": "varlen.append",
    "register_flash_attention_impl": "takeover.implementation",
    "report": "takeover.counts",
    "reset_report": "takeover.counts",
    "sdpa": "takeover.sdpa",
    "tokens_per_expert": "moe_capacity",
    "topk_routing": "moe",
    "topk_routing_with_losses": "router_losses",
}


def __getattr__(name: str) -> Any:
    # torch takes over a second to import. Who needs only `jit` (the lab's command line, and its preflight,
    # which must also run where torch is missing) does not pay for it.
    if name in _MODULES:
        attribute = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = attribute
        return attribute
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
