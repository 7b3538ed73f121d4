"""Calls of transformers' models: attention and experts are told apart by what they are and who computes them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from recordings import record

import cudadent42.recording.recorder as recorder_module
import flashmoe_science
from cudadent42.recording.records import Recording


@pytest.fixture
def qwen() -> Any:
    transformers = pytest.importorskip("transformers")
    configuration = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        intermediate_size=64,
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(configuration).eval()


def test_experts_whose_weights_need_gradients_are_told_apart(qwen: Any) -> None:
    tokens = torch.arange(5)[None]
    qwen.requires_grad_(False)
    qwen.model.layers[0].mlp.experts.requires_grad_(True)

    def script() -> None:
        qwen(tokens)
        with torch.no_grad():
            qwen(tokens)

    recording, _ = record(script)
    calls: Counter[str | None] = Counter()
    for group in recording.groups:
        if group.kind.value == "moe":
            calls[group.reason] += group.calls
    assert calls == {None: 4}
    needed = Counter(
        {group.gradients: group.calls for group in recording.groups if group.kind.value == "moe"}
    )
    assert needed == {True: 2, False: 2}


@pytest.mark.parametrize(("passes", "cache", "cold"), [(3, 99_000, False), (1, 98_000, True)])
def test_weights_are_cold_where_all_layers_together_are_more_than_the_cache(
    qwen: Any, monkeypatch: pytest.MonkeyPatch, passes: int, cache: int, cold: bool
) -> None:
    """Two layers of four experts with 3 x 64 x 32 weights of fp32 are 98,304 x 2 bytes; each counts once."""
    monkeypatch.setattr(recorder_module, "cache_bytes", lambda device: 2 * cache)

    def script() -> None:
        with torch.no_grad():
            for _ in range(passes):
                qwen(torch.arange(5)[None])

    assert record(script)[0].cold_weights is cold


def of(recording: Recording) -> list[tuple[str, str, str, bool, int]]:
    return sorted(
        (group.kind.value, group.baseline, str(group.reason), group.ours, group.calls)
        for group in recording.groups
    )


def test_a_model_of_transformers(qwen: Any) -> None:
    ids = torch.arange(12)[None]

    def script() -> None:
        with torch.no_grad():
            qwen(ids)

    assert of(record(script)[0]) == [
        ("attention", "pytorch", "None", False, 2),
        ("moe", "grouped_mm", "None", False, 2),
    ]
    qwen.set_experts_implementation("eager")
    qwen.set_attn_implementation("eager")
    assert of(record(script)[0]) == [
        ("attention", "pytorch", "transformers' eager attention", False, 2),
        ("moe", "expert_loop", "None", False, 2),
    ]
    flashmoe_science.accelerate(qwen)
    assert of(record(script)[0]) == [
        ("attention", "pytorch", "None", True, 2),
        ("moe", "grouped_mm", "None", True, 2),
    ]
    qwen.train()
    recording, _ = record(lambda: qwen(ids).logits.sum().backward())
    reasons = {group.kind.value: group.reason for group in recording.groups}
    assert reasons == {"attention": None, "moe": None}


def test_experts_with_biases_are_described_and_are_no_case() -> None:
    """GPT-OSS's, whose weights are transposed until `accelerate` turns them: the sizes are the same either way."""
    transformers = pytest.importorskip("transformers")
    configuration = transformers.GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = transformers.GptOssForCausalLM(configuration).eval()

    def script() -> None:
        with torch.no_grad():
            model(torch.arange(12)[None])

    def experts() -> tuple[str, str, bool]:
        (group,) = [each for each in record(script)[0].groups if each.kind.value == "moe"]
        return group.what, str(group.reason), group.ours

    what = "experts, 12 × 64 × 48, 2 of 4"
    reason = "transposed weights of experts, which flashmoe_science.accelerate turns"
    assert experts() == (what, reason, False)
    flashmoe_science.accelerate(model)
    assert experts() == (what, "biases of experts, which capture does not write", True)
