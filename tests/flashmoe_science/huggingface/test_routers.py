"""The routers that `accelerate` takes: the library's choice and weights, on the device where one kernel makes them."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pickle
from typing import Any

import pytest
import torch
from models import MODELS, tokens

import flashmoe_science
from flashmoe_science.errors import BuildError
from flashmoe_science.takeover.counts import Entry

pytest.importorskip(
    "transformers", "5.14.1", reason="before transformers 5.14.1 DeepSeek-V3's router is another"
)

from flashmoe_science.huggingface import routers

pytestmark = pytest.mark.usefixtures("one_thread")

TAKEN = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3")


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator that these tests go through is the same; on a CPU PyTorch's operations stand behind it."""
    monkeypatch.setattr(routers, "_devices", ("cpu", "cuda"))
    flashmoe_science.reset_report()


def accelerated(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model and its twin as the library computes it."""
    library = MODELS[name].make().to(dtype)
    made = copy.deepcopy(library)
    result = flashmoe_science.accelerate(made)
    assert result.routers
    assert result.experts
    assert f"choice of {result.routers[0]}: taken on GPUs" in str(result)
    return made, library


def routers_taken() -> int:
    return sum(
        count.calls
        for count in flashmoe_science.report().counts
        if count.entry is Entry.HUGGING_FACE_ROUTER and count.declined is None
    )


def router_of(model: Any) -> Any:
    return next(each for each in model.modules() if type(each).__name__ in routers._FAMILIES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TAKEN)
def test_the_choice_and_its_weights_are_the_librarys(name: str, dtype: torch.dtype) -> None:
    made, library = accelerated(name, dtype)
    correction = getattr(router_of(made), "e_score_correction_bias", None)
    if correction is not None:  # a trained one; the default of zeros corrects nothing
        for each in (made, library):
            drawn = torch.randn(correction.shape, generator=torch.Generator().manual_seed(7))
            router_of(each).e_score_correction_bias.copy_(drawn)
    hidden = torch.randn(100, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.no_grad():
        logits, weights, ids = router_of(made)(hidden)
        expected = router_of(library)(hidden)
    assert torch.equal(logits, expected[0])
    assert ids.dtype is torch.int32
    assert weights.dtype is torch.float32
    # In bfloat16 some scores are equal, and of those either may be chosen.
    scores = logits.double().softmax(-1) if correction is None else logits.double().sigmoid() + correction
    chosen = [scores.gather(1, each.long()).sort(dim=-1).values for each in (ids, expected[2])]
    torch.testing.assert_close(*chosen, rtol=1e-6, atol=0)
    # DeepSeek's are in no order.
    torch.testing.assert_close(
        weights.sort(dim=-1).values,
        expected[1].float().sort(dim=-1).values,
        rtol=2 * torch.finfo(expected[1].dtype).eps,
        atol=0,
    )
    assert routers_taken() == 1


def test_groups_a_correction_and_a_factor_as_deepseek_has_them() -> None:
    """With several groups, of which some are out, and a choice that the correction changes."""
    model = MODELS["deepseek_v3"]
    options = model.options | {
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
    }
    library = dataclasses.replace(model, options=options | {"routed_scaling_factor": 2.5}).make()
    router = router_of(library)
    router.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 16))
    made = copy.deepcopy(library)
    assert flashmoe_science.accelerate(made).routers == ("DeepseekV3TopkRouter",)
    hidden = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))
    logits, weights, ids = router_of(made)(hidden)
    expected = router(hidden)
    order, theirs = ids.long().argsort(dim=-1), expected[2].argsort(dim=-1)
    assert torch.equal(ids.long().gather(1, order), expected[2].gather(1, theirs))
    torch.testing.assert_close(weights.gather(1, order), expected[1].gather(1, theirs))
    plain = logits.topk(3, dim=-1).indices.sort(dim=-1).values
    assert not torch.equal(plain, ids.long().sort(dim=-1).values)
    wanted = torch.randn(200, 3, generator=torch.Generator().manual_seed(3))
    gradients = [
        torch.autograd.grad((each.gather(1, by) * wanted).sum(), model.weight)[0]
        for each, by, model in ((weights, order, router_of(made)), (expected[1], theirs, router))
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", TAKEN)
def test_a_models_logits_and_every_gradient(name: str) -> None:
    made, library = accelerated(name)
    model = MODELS[name]
    weights = torch.randn(2, 9, 96, generator=torch.Generator().manual_seed(3))
    outputs = [model.call(each) for each in (made, library)]
    for output in outputs:
        (output * weights).mean().backward()
    assert routers_taken() == (1 if name == "deepseek_v3" else 2)  # of its two layers one is dense
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-5)
    right = dict(library.named_parameters())
    for parameter, each in made.named_parameters():
        if right[parameter].grad is not None:
            torch.testing.assert_close(each.grad, right[parameter].grad, rtol=1e-3, atol=1e-6)


def test_the_logits_that_the_library_records_and_its_loss_are_the_same() -> None:
    made, library = accelerated("qwen3_moe")
    ids = tokens()["input_ids"]
    outputs = [each(input_ids=ids, labels=ids, output_router_logits=True) for each in (made, library)]
    assert routers_taken() == 2
    torch.testing.assert_close(outputs[0].aux_loss, outputs[1].aux_loss)
    for one, other in zip(outputs[0].router_logits, outputs[1].router_logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TAKEN)
def test_greedy_text_is_the_same(name: str) -> None:
    made, library = accelerated(name)
    ids = tokens()["input_ids"]
    text = [
        each.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()
        for each in (made, library)
    ]
    assert text[0] == text[1]
    assert routers_taken()


def test_no_graph_break_and_one_operator_a_layer() -> None:
    made, library = accelerated("qwen3_moe")
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(made, backend=backend, fullgraph=True)
    with torch.no_grad():
        output = MODELS["qwen3_moe"].call(compiled_as(compiled, made))
        expected = MODELS["qwen3_moe"].call(library)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count("flashmoe_science.topk_routing.default") == 2
    assert not any("topk" in each and "flashmoe" not in each for each in called)


def compiled_as(compiled: Any, model: Any) -> Any:
    class Compiled:
        parameters = staticmethod(model.parameters)

        def __call__(self, **inputs: Any) -> Any:
            return compiled(**inputs)

    return Compiled()


def test_the_librarys_experts_bring_the_librarys_router_back() -> None:
    made, library = accelerated("qwen3_moe")
    made.set_experts_implementation("grouped_mm")
    hidden = torch.randn(5, 64)
    with torch.no_grad():
        assert all(map(torch.equal, router_of(made)(hidden), router_of(library)(hidden)))
    assert not routers_taken()


def test_experts_that_are_declined_get_the_librarys_types(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_science.huggingface import experts

    made, library = accelerated("qwen3_moe", torch.bfloat16)
    monkeypatch.setattr(experts, "_why_not_tokens", lambda *arguments: "for a test")
    library.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        output, expected = (MODELS["qwen3_moe"].call(each) for each in (made, library))
    assert routers_taken() == 2
    torch.testing.assert_close(output, expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("name", TAKEN)
def test_weights_of_declined_experts_are_rounded_only_where_the_library_rounds_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtral's and DeepSeek-V3's stay in float32 beside tokens in bfloat16; those of the others do not."""
    from flashmoe_science.huggingface import experts

    made, library = accelerated(name, torch.bfloat16)
    monkeypatch.setattr(experts, "_why_not_tokens", lambda *arguments: "for a test")
    own = experts.grouped_mm_experts_forward
    given = []

    def record(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        given.append((ids.dtype, weights.dtype))
        return own(module, hidden, ids, weights)

    monkeypatch.setattr(experts, "grouped_mm_experts_forward", record)
    with torch.no_grad():
        for model in (made, copy.deepcopy(made)):
            MODELS[name].call(model)
        _, weights, ids = router_of(library)(torch.randn(5, 64).bfloat16())
    assert given
    assert set(given) == {(ids.dtype, weights.dtype)}


@pytest.mark.parametrize("name", ["num_group", "top_k", "routed_scaling_factor"])
def test_a_router_without_its_settings_stays(name: str) -> None:
    """A later version of the library may call them otherwise; `accelerate` is not to fail."""
    made = MODELS["deepseek_v3"].make()
    for each in made.modules():
        if type(each).__name__ in routers._FAMILIES:
            delattr(each, name)
    result = flashmoe_science.accelerate(made)
    assert not result.routers
    assert result.experts
    assert ("DeepseekV3TopkRouter", "a router of another form") in result.left


def test_a_router_whose_weights_are_of_all_experts_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As earlier versions of GPT-OSS's gave them."""
    module = importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss")
    own = module.GptOssTopKRouter.forward

    def scattered(self: Any, hidden_states: torch.Tensor) -> Any:
        logits, weights, ids = own(self, hidden_states)
        return logits, torch.zeros_like(logits).scatter(1, ids, weights), ids

    monkeypatch.setattr(module.GptOssTopKRouter, "forward", scattered)
    result = flashmoe_science.accelerate(MODELS["gpt_oss"].make())
    assert not result.routers
    assert any("chooses otherwise" in reason for _, reason in result.left)


def test_copies_and_pickles_of_a_model_compute_the_same() -> None:
    """A pickle forgets the takeover, as it forgets what is not a class of its module."""
    made, _ = accelerated("qwen3_moe")
    twin, pickled = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    assert router_of(twin).forward.__self__ is router_of(twin)
    with torch.no_grad():
        expected, one, other = (MODELS["qwen3_moe"].call(each) for each in (made, twin, pickled))
    torch.testing.assert_close(one, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(other, expected, rtol=0, atol=1e-6)


def test_a_kernel_that_does_not_build_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, library = accelerated("qwen3_moe")
    tried = []

    def broken(*arguments: Any, **options: Any) -> Any:
        tried.append(arguments)
        raise BuildError("no compiler")

    monkeypatch.setattr(routers, "topk_routing", broken)
    monkeypatch.setattr(routers, "_failures", {})
    hidden = torch.randn(5, 64)
    with torch.no_grad():
        for _ in range(2):
            assert all(map(torch.equal, router_of(made)(hidden), router_of(library)(hidden)))
    assert len(tried) == 1
    assert flashmoe_science.report().reasons(Entry.HUGGING_FACE_ROUTER) == {"BuildError: no compiler": 2}


def test_a_router_of_another_kind_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    made = MODELS["deepseek_v3"].make()
    monkeypatch.delitem(routers._FAMILIES, "DeepseekV3TopkRouter")
    result = flashmoe_science.accelerate(made)
    assert not result.routers
    assert ("DeepseekV3TopkRouter", "a router of another kind") in result.left


def test_a_class_that_chooses_otherwise_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a later version of the library might do under the same name."""
    module = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    own = module.Qwen3MoeTopKRouter.forward

    def sigmoid(self: Any, hidden_states: torch.Tensor) -> Any:
        logits, _, _ = own(self, hidden_states)
        weights, ids = logits.sigmoid().topk(self.top_k)
        return logits, weights / weights.sum(-1, keepdim=True), ids

    monkeypatch.setattr(module.Qwen3MoeTopKRouter, "forward", sigmoid)
    result = flashmoe_science.accelerate(MODELS["qwen3_moe"].make())
    assert not result.routers
    assert any("chooses otherwise" in reason for _, reason in result.left)


def test_all_classes_of_the_list_are_there() -> None:
    """In the installed library: a class that it dropped is to leave the list."""
    pytest.importorskip("transformers", "5.23", reason="older versions lack some of them")
    from pathlib import Path

    import transformers.models

    source = "\n".join(
        path.read_text(encoding="utf-8")
        for path in Path(transformers.models.__path__[0]).glob("*/modeling_*.py")
        if "Router(nn.Module)" in path.read_text(encoding="utf-8")
    )
    missing = {name for name in routers._FAMILIES if f"class {name}(nn.Module)" not in source}
    assert not missing
