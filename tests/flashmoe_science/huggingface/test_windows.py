"""Models with windows that hide keys, soft caps and sinks, against the library's eager attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import GROUPED, MODELS, VOCABULARY, Model, tokens

import flashmoe_science

pytest.importorskip("transformers", "5.8.1", reason="needs transformers 5.8.1")

from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from flashmoe_science.huggingface import IMPLEMENTATION
from flashmoe_science.huggingface.masks import attention_mask, window_of
from flashmoe_science.huggingface.weights import holds_experts, turn

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = {"sliding_window": 5}
WINDOWED = {
    "mistral": Model(
        "mistral",
        "MistralForCausalLM",
        "MistralConfig",
        GROUPED | WINDOW,
        tokens,
        generates=True,
        default="eager",
    ),
    "gemma2": replace(MODELS["gemma2"], options=MODELS["gemma2"].options | WINDOW),
    "gpt_oss": replace(MODELS["gpt_oss"], options=MODELS["gpt_oss"].options | WINDOW),
}
each_model = pytest.mark.parametrize("name", WINDOWED)


@pytest.fixture(autouse=True)
def _report() -> None:
    flashmoe_science.reset_report()


def made(name: str, implementation: str | None = None) -> Any:
    """With sinks that count, where it has any."""
    model = WINDOWED[name]
    result = model.make(implementation, IMPLEMENTATION if implementation and model.experts else None)
    for module in result.modules():
        if isinstance(getattr(module, "sinks", None), torch.Tensor):
            module.sinks.data.copy_(torch.linspace(-2, 2, module.sinks.numel()))
        if implementation and model.transposed and holds_experts(module):
            assert turn(module) is None
    return result


def declined() -> dict[str, int]:
    return flashmoe_science.report().reasons()


@each_model
def test_outputs_and_every_gradient(name: str) -> None:
    library, ours = made(name), made(name, IMPLEMENTATION)
    outputs = [WINDOWED[name].call(each) for each in (library, ours)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-5)
    assert declined() == {}
    assert flashmoe_science.report().taken >= 2
    weights = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(3))
    for output in outputs:
        (output * weights).mean().backward()
    right = dict(library.named_parameters())
    for parameter, each in ours.named_parameters():
        if right[parameter].grad is not None:
            torch.testing.assert_close(each.grad, right[parameter].grad, rtol=1e-3, atol=1e-6)


@each_model
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.filterwarnings("ignore")
def test_greedy_generation_gives_the_same_text(name: str, padding: int) -> None:
    """By a cache that keeps as many keys as a window has."""
    ids = tokens()["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    texts = [
        each.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()
        for each in (made(name), made(name, IMPLEMENTATION))
    ]
    assert texts[0] == texts[1]
    assert len({token for text in texts[0] for token in text[9:]}) > 2, "a text that says nothing"
    assert bool(declined()) == (padding > 0)


@each_model
def test_what_is_padding_is_not_seen(name: str) -> None:
    ours, library = made(name, IMPLEMENTATION), made(name)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    mask[1, 7:] = 0
    ids = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        expected, output = (
            WINDOWED[name].call(each, input_ids=ids, attention_mask=mask) for each in (library, ours)
        )
    torch.testing.assert_close(output[mask == 1], expected[mask == 1], rtol=0, atol=1e-5)


def mask_of(mask_function: Any, queries: int = 6, keys: int = 9, **options: Any) -> torch.Tensor:
    given = {
        "q_offset": keys - queries,
        "mask_function": mask_function,
        "allow_is_causal_skip": False,
    } | options
    mask = attention_mask(2, queries, keys, **given)
    assert mask is not None
    return mask


def test_masks_say_what_they_show() -> None:
    window = sliding_window_causal_mask_function(5)
    assert window_of(mask_of(window, local_size=5)) == 4
    assert window_of(mask_of(causal_mask_function)) == -1
    assert window_of(mask_of(window, attention_mask=torch.ones(2, 9, dtype=torch.bool))) == 4
    with torch.inference_mode():  # which counts no writes
        assert window_of(mask_of(window)) is None


@pytest.mark.parametrize(
    "mask",
    [
        lambda: mask_of(chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long))),
        lambda: mask_of(and_masks(sliding_window_causal_mask_function(5), causal_mask_function)),
        lambda: mask_of(and_masks(causal_mask_function, lambda *at: at[3] != 2)),
        lambda: mask_of(causal_mask_function, q_offset=1),  # keys behind the last query
        lambda: mask_of(causal_mask_function, q_offset=torch.tensor(3)),
        lambda: mask_of(causal_mask_function, attention_mask=torch.arange(9)[None].expand(2, 9) > 1),
        lambda: mask_of(causal_mask_function, attention_mask=torch.ones(2, 8, dtype=torch.bool)),
        lambda: mask_of(causal_mask_function).clone(),
        lambda: mask_of(causal_mask_function) & True,
        lambda: mask_of(causal_mask_function).fill_(True),
    ],
)
def test_what_they_show_is_unknown_where_it_is_anything_else(mask: Any) -> None:
    made = mask()
    assert window_of(made) is None


def test_a_mask_of_other_sizes_than_queries_and_keys_is_a_mask() -> None:
    """With a window of one key the library's cache keeps all, and its mask has one column for them."""
    ids = tokens()["input_ids"]
    texts = []
    for implementation in (None, IMPLEMENTATION):
        model = replace(WINDOWED["mistral"], options=GROUPED | {"sliding_window": 1})
        each = model.make(implementation)
        texts.append(each.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("device", ["fake", "meta"])
def test_a_mask_without_values_is_not_looked_at(device: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = made("mistral", IMPLEMENTATION)
    ids = tokens()["input_ids"]
    if device == "meta":
        output = model.to("meta")(
            input_ids=ids.to("meta"), attention_mask=torch.ones_like(ids).to("meta")
        ).logits
    else:
        with FakeTensorMode(allow_non_fake_inputs=True):
            output = model(input_ids=ids, attention_mask=torch.ones(2, 9, dtype=torch.long)).logits
    assert output.shape == (2, 9, VOCABULARY)


def test_a_backbone_that_attends_both_ways_is_left() -> None:
    """Its layers are not causal, and a mask that is left out does not say that it was."""
    gemma = made("gemma2")
    for layer in gemma.modules():
        if hasattr(layer, "is_causal"):
            layer.is_causal = False
    assert flashmoe_science.accelerate(gemma).attention == ()


def test_a_soft_cap_of_zero_is_the_librarys() -> None:
    model = replace(WINDOWED["gemma2"], options=WINDOWED["gemma2"].options | {"attn_logit_softcapping": 0.0})
    ours = model.make(IMPLEMENTATION)
    with torch.no_grad():
        model.call(ours)
    assert "scores with a soft cap: a soft cap of zero" in declined()
