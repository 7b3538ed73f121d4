"""The blocks of transformers whose state `flashmoe_science.MoE` takes, and its options for each."""

from __future__ import annotations

from typing import Any

SIZES = {"hidden": 32, "intermediate": 48, "experts": 6, "top_k": 2}
COMMON = {"hidden_size": 32, "num_experts_per_tok": 2}
BLOCKS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeSparseMoeBlock",
        "Qwen3MoeConfig",
        {"num_experts": 6, "moe_intermediate_size": 48, "norm_topk_prob": True},
        {},
    ),
    "mixtral": (
        "MixtralSparseMoeBlock",
        "MixtralConfig",
        {"num_local_experts": 6, "intermediate_size": 48},
        {},
    ),
    "olmoe": (
        "OlmoeSparseMoeBlock",
        "OlmoeConfig",
        {"num_experts": 6, "intermediate_size": 48, "norm_topk_prob": False},
        {"renormalize": False},
    ),
    "gpt_oss": (
        "GptOssMLP",
        "GptOssConfig",
        {"num_local_experts": 6, "intermediate_size": 48},
        {"activation": "swigluoai", "w13_layout": "interleaved", "router_bias": True, "bias": True},
    ),
    "deepseek_v3": (
        "DeepseekV3MoE",
        "DeepseekV3Config",
        {
            "n_routed_experts": 6,
            "num_local_experts": 6,
            "moe_intermediate_size": 48,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        {
            "scores": "sigmoid",
            "correction_bias": True,
            "scaling_factor": 2.5,
            "groups": 3,
            "top_groups": 2,
            "shared_experts": 2,
        },
    ),
}
"""Block, configuration, its options, and ours."""


def options_of(name: str) -> dict[str, Any]:
    return BLOCKS[name][3]
