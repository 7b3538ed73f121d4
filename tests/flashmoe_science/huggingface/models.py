"""Models of transformers with random weights, two layers each, as small as their parts allow."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

VOCABULARY = 96
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = TEXT | {"num_key_value_heads": 2}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}


@dataclass(frozen=True)
class Model:
    """How one model is made and called."""

    module: str
    """Of ``transformers.models``."""
    name: str
    """Of the model's class."""
    configuration: str
    options: dict[str, Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    output: str = "logits"
    generates: bool = False
    declined: tuple[str, ...] = ()
    """Why calls without a mask go to the library's implementation; none otherwise."""
    attention: bool = True
    """Whether `accelerate` takes its attention."""
    experts: bool = False
    """Whether it takes its experts."""
    transposed: bool = False
    """Whether their weights are to be turned first, which the name alone does not."""
    default: str = "sdpa"
    """What the library would take."""
    masked: bool = True
    """Whether calls with a mask of padding, or of a static cache, are taken."""

    def make(self, attention: str | None = None, experts: str | None = None) -> Any:
        """Its weights are the same in each call."""
        models = importlib.import_module(f"transformers.models.{self.module}")
        # A model changes its configuration.
        configuration = copy.deepcopy(getattr(models, self.configuration)(**self.options))
        names = {"attn_implementation": attention or self.default}
        if experts is not None:
            names["experts_implementation"] = experts
        torch.manual_seed(0)
        return getattr(models, self.name)._from_config(configuration, **names).eval()

    def call(self, model: Any, **inputs: Any) -> torch.Tensor:
        like = next(iter(model.parameters()))

        def as_the_model(each: Any) -> Any:
            if not isinstance(each, torch.Tensor):
                return each
            return each.to(like.device, like.dtype if each.is_floating_point() else each.dtype)

        given = {name: as_the_model(each) for name, each in (self.inputs() | inputs).items()}
        output = model(**given)
        return torch.cat([getattr(output, name) for name in self.output.split()], -1)


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))}


def pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}


def both() -> dict[str, torch.Tensor]:
    return tokens() | pixels()


def sound() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "input_features": torch.randn(2, 16, 24, generator=generator),
        "decoder_input_ids": tokens()["input_ids"],
    }


MODELS = {
    "llama": Model("llama", "LlamaForCausalLM", "LlamaConfig", GROUPED, tokens, generates=True),
    "qwen3": Model(
        "qwen3", "Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 32}, tokens, generates=True
    ),
    "qwen3_moe": Model(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        GROUPED | EXPERTS | {"head_dim": 16},
        tokens,
        generates=True,
        experts=True,
    ),
    "mixtral": Model(
        "mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
        tokens,
        generates=True,
        experts=True,
    ),
    "olmoe": Model(
        "olmoe",
        "OlmoeForCausalLM",
        "OlmoeConfig",
        GROUPED | {"num_experts": 4, "num_experts_per_tok": 2},
        tokens,
        generates=True,
        experts=True,
    ),
    "gemma3": Model(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        GROUPED
        | {"head_dim": 256, "sliding_window": 32, "query_pre_attn_scalar": 256, "tie_word_embeddings": False},
        tokens,
        generates=True,
    ),
    "gemma2": Model(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        GROUPED
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 32,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
        tokens,
        generates=True,
        default="eager",
        masked=False,
    ),
    "gpt2": Model(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "initializer_range": 0.1,
            "tie_word_embeddings": False,  # else each token is followed by itself, whatever attention says
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
        },
        tokens,
        generates=True,
    ),
    "bert": Model("bert", "BertForMaskedLM", "BertConfig", TEXT | NO_DROPOUT, tokens),
    "roberta": Model("roberta", "RobertaForMaskedLM", "RobertaConfig", TEXT | NO_DROPOUT, tokens),
    "vit": Model("vit", "ViTModel", "ViTConfig", VISION, pixels, "last_hidden_state"),
    "dinov2": Model(
        "dinov2", "Dinov2Model", "Dinov2Config", VISION | {"mlp_ratio": 1}, pixels, "last_hidden_state"
    ),
    "clip": Model(
        "clip",
        "CLIPModel",
        "CLIPConfig",
        {"text_config": TEXT | {"eos_token_id": 95}, "vision_config": VISION, "projection_dim": 32},
        both,
        "image_embeds text_embeds",
    ),
    "siglip": Model(
        "siglip",
        "SiglipModel",
        "SiglipConfig",
        {"text_config": TEXT, "vision_config": VISION},
        both,
        "image_embeds text_embeds",
    ),
    "whisper": Model(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "max_source_positions": 12,
            "max_target_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "init_std": 0.1,
        },
        sound,
    ),
    "gpt_oss": Model(
        "gpt_oss",
        "GptOssForCausalLM",
        "GptOssConfig",
        GROUPED
        | {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        tokens,
        generates=True,
        experts=True,
        transposed=True,
        default="eager",
        masked=False,
    ),
    "deepseek_v3": Model(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        GROUPED
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
        },
        tokens,
        generates=True,
        experts=True,
        declined=("head_dim of value differs",),
    ),
}
