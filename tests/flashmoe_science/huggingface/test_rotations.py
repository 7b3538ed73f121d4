"""The rotations of queries and keys that `accelerate` gives to one kernel, on the device where it is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from models import MODELS

import flashmoe_science
from flashmoe_science.operators.rotation import ROTATE
from flashmoe_science.takeover.counts import Entry

pytest.importorskip("transformers", "5.8.1", reason="needs transformers 5.8.1")

from flashmoe_science.huggingface import rotations

pytestmark = pytest.mark.usefixtures("one_thread")

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
TAKEN = ("llama", "qwen3", "qwen3_moe", "mixtral", "olmoe", "gemma3", "gpt_oss")
LAYERS = 2


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that these tests go through are the same; on a CPU the operator composes what the kernel does."""
    monkeypatch.setattr(rotations, "_devices", ("cpu", "cuda"))
    flashmoe_science.reset_report()


def accelerated(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Any, Any]:
    """A model, and its twin whose rotations are the library's."""
    library = MODELS[name].make().to(device, dtype)
    made = copy.deepcopy(library)
    for each in (made, library):
        result = flashmoe_science.accelerate(each, norms=False, rotations=each is made)
        assert bool(result.rotations) == (each is made)
    assert f"rotation of {type(layer_of(made)).__name__}: taken on GPUs" in str(
        flashmoe_science.accelerate(made, norms=False)
    )
    flashmoe_science.reset_report()
    return made, library


def layer_of(model: Any) -> Any:
    return next(each for each in model.modules() if rotations.rotates(each))


def calls(declined: str | None = None) -> int:
    return sum(
        count.calls
        for count in flashmoe_science.report().counts
        if count.entry is Entry.HUGGING_FACE_ROTATION and count.declined == declined
    )


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in TAKEN),
        # GPT-OSS has attention sinks, and float32 experts are not for GPUs, so nothing of it would be taken.
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in TAKEN if name != "gpt_oss"),
    ],
)
def test_logits_and_every_gradient(name: str, device: str) -> None:
    made, library = accelerated(name, device=device)
    outputs = [MODELS[name].call(each) for each in (made, library)]
    weights = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(3)).to(device)
    for output in outputs:
        (output * weights).mean().backward()
    assert calls() == LAYERS
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-5)
    right = dict(library.named_parameters())
    for parameter, each in made.named_parameters():
        if right[parameter].grad is not None:
            torch.testing.assert_close(each.grad, right[parameter].grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.filterwarnings("ignore")
def test_greedy_generation_gives_the_same_text(name: str, device: str) -> None:
    made, library = accelerated(name, device=device)
    ids = MODELS[name].inputs()["input_ids"].to(device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    texts = [
        each.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()
        for each in (made, library)
    ]
    assert texts[0] == texts[1]
    assert calls() == 6 * LAYERS


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_in_bfloat16_it_is_as_exact_as_the_librarys(name: str, device: str) -> None:
    """Against the library's eager code in float32 with the same weights."""
    made, library = accelerated(name, torch.bfloat16, device)
    exact = MODELS[name].make("eager").bfloat16().float().to(device)
    with torch.no_grad():
        ours, theirs, right = (MODELS[name].call(each).float() for each in (made, library, exact))
    assert calls() == LAYERS
    errors = [float((each - right).norm() / right.norm()) for each in (ours, theirs)]
    assert errors[0] <= 1.5 * errors[1] + 2**-9


def test_they_can_be_left_to_the_library() -> None:
    made = MODELS["qwen3"].make()
    assert not flashmoe_science.accelerate(made, rotations=False).rotations
    assert "forward" not in vars(layer_of(made))


def test_the_class_and_its_file_stay_as_they_are() -> None:
    from transformers.models.qwen3 import modeling_qwen3

    before = modeling_qwen3.apply_rotary_pos_emb, modeling_qwen3.Qwen3Attention.forward
    made, library = accelerated("qwen3")
    with torch.no_grad():
        MODELS["qwen3"].call(made)
        assert calls() == LAYERS
        MODELS["qwen3"].call(library)
    assert calls() == LAYERS
    assert before == (modeling_qwen3.apply_rotary_pos_emb, modeling_qwen3.Qwen3Attention.forward)


def test_other_names_of_the_file_are_looked_up_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever replaces one after `accelerate` reaches the layer as before."""
    from transformers.models.qwen3 import modeling_qwen3

    made, _ = accelerated("qwen3")
    seen = []

    class Interfaces:
        def get_interface(self, name: str, default: Any) -> Any:
            seen.append(name)
            return default

    monkeypatch.setattr(modeling_qwen3, "ALL_ATTENTION_FUNCTIONS", Interfaces())
    with torch.no_grad():
        MODELS["qwen3"].call(made)
    assert len(seen) == LAYERS


def test_the_librarys_implementations_bring_its_rotation_back() -> None:
    made, library = accelerated("qwen3")
    for each in (made, library):
        each.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(MODELS["qwen3"].call(made), MODELS["qwen3"].call(library))
    assert not calls()


def test_torch_compile_sees_the_librarys_code() -> None:
    """It fuses that itself."""
    made, library = accelerated("qwen3")
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(made, backend=backend, fullgraph=True)
    inputs = MODELS["qwen3"].inputs()
    with torch.no_grad():
        output = compiled(**inputs).logits
    torch.testing.assert_close(output, MODELS["qwen3"].call(library), rtol=0, atol=1e-5)
    (graph,) = graphs
    assert not [node for node in graph.graph.nodes if node.target is ROTATE]
    assert not calls()


def test_copies_and_pickles_compute_the_same() -> None:
    made, _ = accelerated("qwen3")
    twin, pickled = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    assert layer_of(twin).forward.__self__ is layer_of(twin)
    with torch.no_grad():
        expected, one, other = (MODELS["qwen3"].call(each) for each in (made, twin, pickled))
    torch.testing.assert_close(one, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(other, expected, rtol=0, atol=1e-6)


def test_a_hook_of_somebody_else_stays() -> None:
    made = MODELS["qwen3"].make()
    hooked = layer_of(made)
    own = hooked.forward
    hooked.forward = lambda *inputs, **options: own(*inputs, **options)
    result = flashmoe_science.accelerate(made)
    assert ("rotation of Qwen3Attention", "a layer that somebody else's hook calls") in result.left


def test_a_function_that_rotates_otherwise_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3 import modeling_qwen3

    own = modeling_qwen3.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", lambda q, k, cos, sin: own(q, k, cos, -sin))
    result = flashmoe_science.accelerate(MODELS["qwen3"].make())
    assert ("rotation of Qwen3Attention", "its function rotates otherwise") in result.left


def rotated(*arguments: Any, **options: Any) -> Any:
    """By what a layer of Qwen3 that was taken calls; with the library's function beside it."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as own

    return rotations._attempt(own, *arguments, **options), own(*arguments, **options)


def test_what_stays_with_the_library_call_by_call() -> None:
    query, key, cosine, sine = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), *torch.randn(2, 2, 5, 16)
    with_gradient = cosine.clone().requires_grad_()
    cases = {
        "arguments of another form": (query, key, cosine[:, :1], sine[:, :1]),
        "more than one dtype": (query, key, cosine.double(), sine),
        "positions that have a gradient": (query, key, with_gradient, sine),
        "head_dim no multiple of 8": (query[..., :4], key[..., :4], cosine[..., :4], sine[..., :4]),
    }
    expected: dict[str, int] = {}
    for reason, arguments in cases.items():
        expected[reason] = 1
        mine, right = rotated(*arguments)
        assert all(torch.equal(one, other) for one, other in zip(mine, right, strict=True))
    transposed = query.transpose(1, 2), key.transpose(1, 2)
    mine, right = rotated(*transposed, cosine, sine, unsqueeze_dim=2)
    assert all(torch.equal(one, other) for one, other in zip(mine, right, strict=True))
    expected["arguments of another form"] += 1
    assert flashmoe_science.report().reasons(Entry.HUGGING_FACE_ROTATION) == expected


@pytest.mark.parametrize("columns", [8, 16])
def test_a_function_of_parts_of_heads_turns_whole_heads_alone(columns: int) -> None:
    """GLM-4.5 and MiniMax-M2 turn a half of each head, by tables as wide as GPT-OSS's, which are of whole heads."""
    from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb as own

    query, key, cosine, sine = (
        torch.randn(shape) for shape in ((2, 4, 5, 16), (2, 2, 5, 16), (2, 5, columns), (2, 5, columns))
    )
    results = rotations._attempt(own, query, key, cosine, sine), own(query, key, cosine, sine)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert calls("a part of each head") == int(columns == 8)
    assert calls() == int(columns == 16)


def test_tensors_of_several_devices_stay_with_the_library() -> None:
    """The kernel would read the address of another device."""
    query, key, table = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 3, 8)
    with pytest.raises(RuntimeError, match="device"):
        rotated(query, key, table.to("meta"), table)
    assert calls("more than one device") == 1


def test_a_machine_that_cannot_make_the_kernel_keeps_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> Any:
        raise flashmoe_science.DeviceError("no NVRTC; install it")

    made, library = accelerated("qwen3")
    monkeypatch.setattr(rotations, "ROTATE", fails)
    monkeypatch.setattr(rotations, "_failures", {})
    with torch.no_grad():
        assert torch.equal(MODELS["qwen3"].call(made), MODELS["qwen3"].call(library))
    assert calls("DeviceError: no NVRTC") == LAYERS
