"""transformers' continuous batching by `attention_varlen`, against its own eager attention."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from models import GROUPED

pytest.importorskip("transformers", "5.23", reason="needs transformers 5.23")

from transformers import ContinuousBatchingConfig, GenerationConfig

from flashmoe_science import InputError
from flashmoe_science.huggingface import paged_attention, paging

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = GROUPED | {
    "head_dim": 16,
    "initializer_range": 0.4,
    "eos_token_id": 95,
    "tie_word_embeddings": False,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {}),
    "windows and caps": (
        "Gemma2",
        {"sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": None},
    ),
    "windows and sinks": (
        "GptOss",
        {
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
BATCHING = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 24, "default_compile_level": 0}
"""Prompts come in chunks of up to 24 tokens, beside decode steps of others."""


def made(name: str) -> Any:
    model, options = MODELS[name]
    models = importlib.import_module("transformers")
    torch.manual_seed(0)
    configuration = getattr(models, f"{model}Config")(**LAYERS | options)
    model = getattr(models, f"{model}ForCausalLM")._from_config(configuration, attn_implementation="eager")
    if name == "windows and sinks":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model.eval()


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 95, (length,), generator=generator).tolist() for length in (5, 17, 30, 3)]


GREEDY = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)


def one_by_one(model: Any) -> list[list[int]]:
    """By eager attention without batching: the library's `paged|eager` leaves out caps."""
    texts = [model.generate(torch.tensor([prompt]), GREEDY)[0].tolist() for prompt in prompts()]
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts(), strict=True)]


def batched(model: Any) -> list[list[int]]:
    batching = ContinuousBatchingConfig(**BATCHING)
    results = model.generate_batch(prompts(), GREEDY, continuous_batching_config=batching, progress_bar=False)
    return [result.generated_tokens for result in results.values()]


@pytest.mark.parametrize("name", MODELS)
def test_the_same_texts_as_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    expected = one_by_one(model)
    assert len(expected) == 4
    # No text that any attention would give.
    assert len({token for answer in expected for token in answer}) > 8
    before = model.config._attn_implementation
    calls: list[int] = []
    attend = paging.attention_varlen
    monkeypatch.setattr(
        paging, "attention_varlen", lambda *args, **kwargs: calls.append(1) or attend(*args, **kwargs)
    )
    with paged_attention(model):
        assert batched(model) == expected
    assert calls
    assert model.config._attn_implementation == before


def test_a_call_without_a_paged_cache_is_refused() -> None:
    model = made("plain")
    with paged_attention(model), pytest.raises(InputError, match="without a paged cache"):
        model(torch.zeros(1, 3, dtype=torch.int64))
    assert model(torch.zeros(1, 3, dtype=torch.int64)).logits.shape == (1, 3, 96)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InputError, match="model is a Linear"), paged_attention(torch.nn.Linear(2, 2)):
        pass


def test_an_older_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    older = type("PagedAttentionCache", (), {"update": lambda self, key_states, read_index: None})
    monkeypatch.setattr(paging, "PagedAttentionCache", older)
    with pytest.raises(InputError, match=r"expected 5\.23 or newer"), paged_attention(made("plain")):
        pass
