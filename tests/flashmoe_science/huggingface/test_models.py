"""Models of transformers with our attention and experts against the library's own: numbers, gradients, text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MODELS, VOCABULARY, Model, tokens

import flashmoe_science
from flashmoe_science.takeover.counts import Entry

pytest.importorskip("transformers", "5.8.1", reason="needs transformers 5.8.1")

from flashmoe_science.huggingface import IMPLEMENTATION
from flashmoe_science.huggingface.weights import holds_experts, turn

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = [name for name, model in MODELS.items() if model.generates]
each_model = pytest.mark.parametrize("name", MODELS)
each_generator = pytest.mark.parametrize("name", TEXT)


@pytest.fixture(scope="module", autouse=True)
def _kernel() -> None:
    tensor = torch.zeros(1, 1, 1, 8)
    try:
        flashmoe_science.flash_attention(tensor, tensor, tensor)
    except flashmoe_science.DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _report() -> None:
    flashmoe_science.reset_report()


def ours(model: Model, dtype: torch.dtype = torch.float32) -> Any:
    made = model.make(IMPLEMENTATION, IMPLEMENTATION if model.experts else None).to(dtype)
    if model.transposed:
        for each in made.modules():
            if holds_experts(each):
                assert turn(each) is None
    return made


def gradients(model: Model, made: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output, and the gradient of every parameter by its product with fixed numbers."""
    output = model.call(made)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    (output.float() * weights).mean().backward()
    return output.detach().float(), {
        name: each.grad.float() for name, each in made.named_parameters() if each.grad is not None
    }


def error(tensor: torch.Tensor, exact: torch.Tensor) -> float:
    return float((tensor - exact).norm() / (exact.norm() + 1e-12))


def assert_taken(model: Model) -> None:
    """The kernels computed what they are said to take, and nothing else was declined."""
    report = flashmoe_science.report()
    assert set(report.reasons()) == set(model.declined)
    entries = {count.entry for count in report.counts if count.declined is None}
    assert (Entry.HUGGING_FACE_ATTENTION in entries) == (model.attention and not model.declined)
    assert (Entry.HUGGING_FACE_EXPERTS in entries) == model.experts


@each_model
def test_outputs_and_every_gradient_are_as_exact_as_the_librarys(name: str) -> None:
    """In bfloat16, against the library's eager attention in float32 with the same weights."""
    model = MODELS[name]
    exact = model.make("eager").bfloat16().float()
    right, right_gradients = gradients(model, exact)
    library, library_gradients = gradients(model, model.make().bfloat16())
    flashmoe_science.reset_report()
    output, output_gradients = gradients(model, ours(model, torch.bfloat16))
    assert_taken(model)
    assert error(output, right) <= 1.5 * error(library, right) + 2**-9
    assert output_gradients.keys() == library_gradients.keys() == right_gradients.keys()
    for parameter, gradient in output_gradients.items():
        against = right_gradients[parameter]
        if against.abs().max() > 1e-7:  # a bias that softmax cannot see has rounding for a gradient
            allowed = 2 * error(library_gradients[parameter], against) + 2**-7
            assert error(gradient, against) <= allowed, parameter


@each_model
def test_outputs_in_float32(name: str) -> None:
    model = MODELS[name]
    expected = model.call(model.make("eager"))
    with torch.no_grad():
        output = model.call(ours(model))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


@each_generator
def test_what_is_padding_is_not_seen(name: str) -> None:
    """Other tokens under the mask change nothing, on either side of the text; the library gives the same."""
    model = MODELS[name]
    made, library = ours(model), model.make("eager")
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    mask[1, 6:] = 0
    ids = tokens()["input_ids"]
    others = torch.where(mask == 1, ids, (ids + 7) % VOCABULARY)
    with torch.no_grad():
        one, other = (model.call(made, input_ids=each, attention_mask=mask) for each in (ids, others))
        expected = model.call(library, input_ids=ids, attention_mask=mask)
    seen = mask == 1
    # Tokens of a mixture's padding move the others to other rows of a product, which rounds them otherwise.
    torch.testing.assert_close(one[seen], other[seen], rtol=0, atol=1e-6)
    torch.testing.assert_close(one[seen], expected[seen], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_padding_of_an_encoder_is_taken(name: str) -> None:
    """Its masks are those of padding alone, in all layers the same."""
    model = MODELS[name]
    made = ours(model)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 5:] = 0
    expected = model.call(model.make("eager"), attention_mask=mask)
    output = model.call(made, attention_mask=mask)
    assert (flashmoe_science.report().taken, flashmoe_science.report().declined) == (2, 0)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


def test_a_text_longer_than_a_window_is_taken() -> None:
    model = MODELS["gemma3"]
    ids = torch.randint(2, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(6))
    library = model.make("eager")
    with torch.no_grad():
        expected = model.call(library, input_ids=ids)
        output = model.call(ours(model), input_ids=ids)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
    report = flashmoe_science.report()
    assert (report.taken, report.declined) == (2, 0)


def test_with_padding_it_is_the_librarys_and_says_so() -> None:
    model = MODELS["gemma3"]
    ids = torch.randint(2, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(6))
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :4] = 0
    library = model.make("eager")
    with torch.no_grad():
        expected = model.call(library, input_ids=ids, attention_mask=mask)
        output = model.call(ours(model), input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(output[mask == 1], expected[mask == 1], rtol=0, atol=1e-5)
    report = flashmoe_science.report()
    assert report.taken == 0
    assert report.reasons() == {"a mask with rows of its own for heads or queries": 2}
    left = flashmoe_science.accelerate(library).left
    assert ("Gemma3Attention", "texts longer than its window, with padding or compiled") in left


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_loaded_by_name_from_a_folder(tmp_path: Path) -> None:
    """As the library loads it, with both names and one import."""
    from transformers import AutoModelForCausalLM

    model = MODELS["qwen3_moe"]
    saved = model.make()
    saved.save_pretrained(tmp_path)
    made = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=IMPLEMENTATION, experts_implementation=IMPLEMENTATION
    )
    with torch.no_grad():
        torch.testing.assert_close(model.call(made), model.call(saved), rtol=0, atol=1e-5)
    taken = {count.entry: count.calls for count in flashmoe_science.report().counts}
    assert taken == {Entry.HUGGING_FACE_ATTENTION: 2, Entry.HUGGING_FACE_EXPERTS: 2}
    assert flashmoe_science.report().declined == 0


def generate(made: Any, cache: str | None) -> list[list[int]]:
    ids = tokens()["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    text: torch.Tensor = made.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, **options
    )
    return text.tolist()


@each_generator
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.filterwarnings("ignore")
def test_greedy_generation_gives_the_same_text(name: str, cache: str | None) -> None:
    model = MODELS[name]
    expected = generate(model.make(), cache)
    assert len({token for text in expected for token in text[9:]}) > 2, "a text that says nothing"
    flashmoe_science.reset_report()
    assert generate(ours(model), cache) == expected
    if model.attention and model.masked:
        assert flashmoe_science.report().taken


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.filterwarnings("ignore")
def test_greedy_generation_from_sound_gives_the_same_text(cache: str | None) -> None:
    """Whisper's decoder, whose layers attend to what was heard besides."""
    model = MODELS["whisper"]
    model = replace(model, options=model.options | {"init_std": 0.6, "tie_word_embeddings": False})
    options = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    texts = []
    for name in (None, IMPLEMENTATION):
        made = model.make(name)
        heard = model.inputs()["input_features"]
        flashmoe_science.reset_report()
        text = made.generate(
            heard, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0, **options
        )
        texts.append(text.tolist())
    assert texts[0] == texts[1]
    assert len({token for text in texts[0] for token in text}) > 4
    assert flashmoe_science.report().declined == 0
    # Two layers of the encoder, and in each step the decoder's two of both kinds.
    assert flashmoe_science.report().taken == 2 + 8 * 4


def generate_compiled(made: Any) -> list[list[int]]:
    """With a static cache and padding on the left; each step is one graph."""
    from transformers import CompileConfig

    compilation = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compilation._compile_all_devices = True
    ids = tokens()["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    text: torch.Tensor = made.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",
        compile_config=compilation,
    )
    return text.tolist()


def compiled_steps_stay_with_the_kernels(name: str) -> None:
    """The mask over a static cache is no reason to leave: what a step sees is known on the device alone."""
    model = MODELS[name]
    expected = generate(model.make(), "static")
    torch._dynamo.reset()
    flashmoe_science.reset_report()
    assert generate_compiled(ours(model)) == expected
    traced = [count for count in flashmoe_science.report().counts if count.traced]
    if model.attention and not model.declined and model.masked:
        assert {count.entry for count in traced} >= {Entry.HUGGING_FACE_ATTENTION}
        assert not [count for count in traced if count.declined is not None]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_compiled_generation_with_a_static_cache(name: str) -> None:
    compiled_steps_stay_with_the_kernels(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in TEXT if name not in ("llama", "qwen3_moe")])
def test_compiled_generation_with_a_static_cache_in_the_others(name: str) -> None:
    compiled_steps_stay_with_the_kernels(name)


def test_a_token_alone_has_no_mask_in_a_graph() -> None:
    """The library makes one there, and with it a list of keys for each layer."""
    from flashmoe_science.operators.listed_keys import LISTED_KEYS

    model = MODELS["qwen3"]
    made, graphs = ours(model), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    ids = tokens()["input_ids"][:1, :1]
    torch._dynamo.reset()
    compiled = torch.compile(made, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        output = compiled(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(output, model.make("eager")(input_ids=ids).logits, rtol=0, atol=1e-5)
    (graph,) = graphs
    assert not [node for node in graph.graph.nodes if node.target is LISTED_KEYS]
    assert flashmoe_science.report().taken == 2


def losses(model: Model, made: Any, steps: int) -> list[float]:
    """Of training towards fixed numbers."""
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    made.train()
    result = []
    for _ in range(steps):
        output = model.call(made)
        target = torch.randn(output.shape, generator=torch.Generator().manual_seed(4))
        loss = (output - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


@each_model
def test_fifty_steps_of_training_follow_the_librarys(name: str) -> None:
    model = MODELS[name]
    expected = losses(model, model.make(), 50)
    flashmoe_science.reset_report()
    curve = losses(model, ours(model), 50)
    assert_taken(model)
    assert expected[-1] < 0.99 * expected[0]
    assert curve == pytest.approx(expected, rel=1e-3, abs=1e-6)


def compiled(name: str) -> None:
    """One graph, and the same numbers and gradients as uncompiled."""
    model = MODELS[name]
    made = ours(model)
    expected, right = gradients(model, made)
    made.zero_grad()
    torch._dynamo.reset()
    flashmoe_science.reset_report()
    graph = torch.compile(made, backend="aot_eager", fullgraph=True)
    output = model.call(_Compiled(made, graph))
    assert_taken(model)
    assert all(count.traced for count in flashmoe_science.report().counts)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    (output * weights).mean().backward()
    torch.testing.assert_close(output.detach(), expected, rtol=0, atol=1e-5)
    for parameter, each in made.named_parameters():
        if parameter in right:
            torch.testing.assert_close(each.grad, right[parameter], rtol=1e-3, atol=1e-5)


class _Compiled:
    """A compiled model with the parameters of the model that it was made from."""

    def __init__(self, made: Any, graph: Any) -> None:
        self.parameters, self._graph = made.parameters, graph

    def __call__(self, **inputs: Any) -> Any:
        return self._graph(**inputs)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_no_graph_break(name: str) -> None:
    compiled(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("llama", "bert")])
def test_no_graph_break_in_the_others(name: str) -> None:
    compiled(name)


@each_model
def test_accelerate_says_what_it_took(name: str) -> None:
    model = MODELS[name]
    made = model.make()
    result = flashmoe_science.accelerate(made)
    assert bool(result.attention) == model.attention
    assert bool(result.experts) == model.experts
    reasons = [reason for _, reason in result.left]
    for reason in model.declined:
        assert any(reason.split(" are")[0] in each for each in reasons), (reason, reasons)
    with torch.no_grad():
        output = model.call(made)
    torch.testing.assert_close(output, model.call(model.make("eager")), rtol=0, atol=1e-5)
    entries = {count.entry for count in flashmoe_science.report().counts if count.declined is None}
    assert (Entry.HUGGING_FACE_EXPERTS in entries) == bool(result.experts)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "gemma3"])
@pytest.mark.parametrize("cached", [False, True], ids=["alone", "with a cache"])
def test_training_under_autocast_with_weights_in_float32_is_taken(name: str, cached: bool) -> None:
    """As Trainer has it with ``bf16=True``: queries and keys come in float32, values in bfloat16 but for a cache's."""
    model = MODELS[name]
    results = []
    for made in (model.make(), ours(model)):
        flashmoe_science.reset_report()
        with torch.autocast("cpu", torch.bfloat16):
            output = model.call(made.train(), use_cache=cached)
        output.float().square().mean().backward()
        weight = made.model.layers[0].self_attn.q_proj.weight
        results.append((output.dtype, output.detach().float(), weight.grad))
    (dtype, right, gradient), (own_dtype, own, own_gradient) = results
    assert own_dtype is dtype
    assert error(own, right) <= 2**-6
    assert error(own_gradient, gradient) <= 2**-4
    assert flashmoe_science.report().declined == 0
    taken = {count.entry: count.calls for count in flashmoe_science.report().counts}
    assert taken[Entry.HUGGING_FACE_ATTENTION] == 2


def test_accelerate_wants_a_model_of_transformers() -> None:
    with pytest.raises(flashmoe_science.InputError, match=r"flashmoe_science\.sdpa\(\)"):
        flashmoe_science.accelerate(torch.nn.Linear(2, 2))


def test_dropout_in_training_is_the_librarys() -> None:
    model = MODELS["bert"]
    made = ours(model).train()
    for layer in made.modules():
        if hasattr(layer, "scaling"):
            layer.dropout.p = 0.25
    torch.manual_seed(0)
    output = model.call(made)
    made.set_attn_implementation("sdpa")
    torch.manual_seed(0)
    assert torch.equal(output, model.call(made))
    assert flashmoe_science.report().reasons() == {"dropout": 2}
