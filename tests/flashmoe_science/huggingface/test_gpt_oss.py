"""GPT-OSS's experts: biases, a clamped gate, and weights that are held transposed."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MODELS

import flashmoe_science
from flashmoe_science.takeover.counts import Entry

pytest.importorskip("transformers", "5.8.1", reason="needs transformers 5.8.1")

from flashmoe_science.huggingface import IMPLEMENTATION
from flashmoe_science.huggingface.weights import TRANSPOSED, layer_of, turn

pytestmark = pytest.mark.usefixtures("one_thread")

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
MODEL = MODELS["gpt_oss"]
EXPERTS, HIDDEN, INTERMEDIATE = 4, 64, 48


@pytest.fixture(autouse=True)
def _report() -> None:
    flashmoe_science.reset_report()


def experts(
    module: str = "gpt_oss", name: str = "GptOssExperts", implementation: str = IMPLEMENTATION, **options: Any
) -> Any:
    """With weights that drive projections beyond the gate's limits on both sides, and biases that count."""
    models = importlib.import_module(f"transformers.models.{module}")
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    prefix = name.removesuffix("Experts")
    configuration = getattr(models, f"{prefix}Config")(
        num_local_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, **options
    )
    configuration._experts_implementation = implementation
    made = getattr(modeling, name)(configuration)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        spread = 0.8 if parameter.dim() == 3 else 2.0
        parameter.data.copy_(spread * torch.randn(parameter.shape, generator=generator))
    return made


def routing(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2, generator=generator)
    return torch.randn(tokens, HIDDEN, generator=generator), ids, weights


def taken() -> int:
    return sum(
        each.calls
        for each in flashmoe_science.report().counts
        if each.entry is Entry.HUGGING_FACE_EXPERTS and each.declined is None
    )


def gradients(made: Any, tokens: int, exact: bool) -> dict[str, torch.Tensor]:
    """The output and the gradients of all parameters, the tokens and the routing's weights, in float64."""
    device, dtype = made.down_proj.device, made.down_proj.dtype
    hidden, ids, weights = routing(tokens)
    hidden = hidden.to(device, dtype).requires_grad_()
    weights = weights.to(device, torch.float32).to(dtype if exact else torch.float32).requires_grad_()
    output = made(hidden, ids.to(device), weights)
    wanted = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(device, dtype)
    output.backward(wanted)
    tensors = {"output": output, "hidden": hidden.grad, "routing": weights.grad}
    tensors |= {name: parameter.grad for name, parameter in made.named_parameters()}
    return {name: each.detach().double().cpu() for name, each in tensors.items() if each is not None}


def error(tensor: torch.Tensor, exact: torch.Tensor) -> float:
    return float((tensor - exact).norm() / exact.norm())


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_experts_and_every_gradient_against_the_eager_ones_in_float64(device: str, tokens: int) -> None:
    """In bfloat16, few tokens and more; the library's own implementation says how near bfloat16 can come."""
    made = experts().bfloat16().to(device)
    library = copy.deepcopy(made)
    library.config._experts_implementation = "grouped_mm"
    eager = copy.deepcopy(library).cpu().double()
    eager.config._experts_implementation = "eager"
    assert turn(made) is None
    right = gradients(eager, tokens, exact=True)
    theirs = gradients(library, tokens, exact=False)
    flashmoe_science.reset_report()
    ours = gradients(made, tokens, exact=False)
    if device == "cpu" or torch.cuda.get_device_capability() == (9, 0):
        assert taken() == 1
    assert right.keys() == ours.keys()
    assert len(ours) == 7
    for name, tensor in ours.items():
        allowed = 1.5 * error(theirs[name], right[name]) + 2**-9
        assert error(tensor, right[name]) <= allowed, (name, error(tensor, right[name]), allowed)


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("device", [CUDA])
def test_without_gradients_on_any_gpu(device: str, tokens: int) -> None:
    made = experts().bfloat16().to(device)
    assert turn(made) is None
    hidden, ids, weights = (each.to(device) for each in routing(tokens))
    library = copy.deepcopy(made)
    library.config._experts_implementation = "grouped_mm"
    eager = copy.deepcopy(made).cpu().double()
    eager.config._experts_implementation = "eager"
    with torch.no_grad():
        right = eager(hidden.bfloat16().double().cpu(), ids.cpu(), weights.double().cpu())
        output, theirs = (each(hidden.bfloat16(), ids, weights) for each in (made, library))
    assert taken() == 1
    assert error(output.double().cpu(), right) <= 1.5 * error(theirs.double().cpu(), right) + 2**-9


def test_float32_is_the_eager_result() -> None:
    made = experts()
    eager = copy.deepcopy(made)
    eager.config._experts_implementation = "eager"
    assert turn(made) is None
    with torch.no_grad():
        output, right = (each(*routing(9)) for each in (made, eager))
    assert taken() == 1
    torch.testing.assert_close(output, right, rtol=1e-5, atol=1e-4)


def test_the_gates_limits_are_reached() -> None:
    """What the tests above compare would otherwise be a gate without limits."""
    made = experts()
    hidden, ids, _ = routing(70)
    projected = torch.einsum("th,ehi->tei", hidden, made.gate_up_proj) + made.gate_up_proj_bias
    chosen = projected[torch.arange(70)[:, None], ids]
    assert (chosen[..., ::2] > 7).any()
    assert (chosen[..., 1::2] > 7).any()
    assert (chosen[..., 1::2] < -7).any()


def test_turned_weights_are_the_same_parameters() -> None:
    """Shapes, numbers, copies and what is loaded into them; the library's own implementations read them too."""
    made = experts()
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in made.named_parameters()}
    assert layer_of(made) == TRANSPOSED
    with torch.no_grad():
        made.config._experts_implementation = "grouped_mm"
        expected = made(*routing(9))
    assert turn(made) is None
    for name, parameter in made.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    assert made.down_proj.transpose(1, 2).is_contiguous()
    twin = copy.deepcopy(made)
    twin.load_state_dict({name: value for name, (_, value) in before.items()})
    for each in (made, twin, twin.bfloat16().float()):
        assert not isinstance(layer_of(each), str)
    for implementation in ("grouped_mm", "eager", "batched_mm"):
        made.config._experts_implementation = implementation
        with torch.no_grad():
            torch.testing.assert_close(made(*routing(9)), expected, rtol=1e-5, atol=1e-4)


def test_an_optimizer_steps_and_the_kernels_still_take_them() -> None:
    made = experts()
    assert turn(made) is None
    optimizer = torch.optim.AdamW(made.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        made(*routing(9)).square().mean().backward()
        assert made.gate_up_proj.grad.stride() == made.gate_up_proj.stride()
        optimizer.step()
    assert taken() == 2


def test_by_name_alone_the_librarys_implementation_computes_them_and_says_the_way() -> None:
    made = experts()
    eager = copy.deepcopy(made)
    eager.config._experts_implementation = "eager"
    with torch.no_grad():
        output, right = (each(*routing(9)) for each in (made, eager))
    assert flashmoe_science.report().reasons(Entry.HUGGING_FACE_EXPERTS) == {TRANSPOSED: 1}
    torch.testing.assert_close(output, right, rtol=1e-5, atol=1e-4)


def test_weights_inside_a_larger_tensor_stay() -> None:
    """Those of FSDP's flat parameters, say: other strides would cut them off from it."""
    made = experts()
    flat = torch.zeros(made.down_proj.numel() + 1)
    made.down_proj.data = flat[1:].view(made.down_proj.shape)
    pointer = made.gate_up_proj.data_ptr()
    assert turn(made) == "transposed weights of experts inside a larger tensor"
    assert made.gate_up_proj.data_ptr() == pointer
    made.down_proj = torch.nn.Parameter(made.down_proj.data.clone())
    type_of_its_own = type("OtherParameter", (torch.nn.Parameter,), {})
    made.down_proj = type_of_its_own(made.down_proj.data)
    assert turn(made) == "transposed weights of experts that are no plain parameters"


@pytest.mark.parametrize(("name", "value"), [("alpha", 1.5), ("limit", 10.0), ("limit", None)])
def test_other_constants_are_the_models_own_gate(name: str, value: float | None) -> None:
    made = experts()
    setattr(made, name, value)
    assert layer_of(made) == "a gate of the model's own"


def test_a_gate_that_computes_something_else_is_not_taken() -> None:
    """Known by what it computes, and not by its name."""
    made = experts()

    class GptOssExperts(type(made)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            own: torch.Tensor = super()._apply_gate(gate_up)
            return own - 1

    made.__class__ = GptOssExperts
    assert layer_of(made) == "a gate of the model's own"


def test_the_same_gate_over_joined_projections() -> None:
    """As OpenAI's privacy filter has it: gate rows first, then up rows."""
    pytest.importorskip(
        "transformers.models.openai_privacy_filter", reason="of later versions of transformers"
    )
    made = experts("openai_privacy_filter", "OpenAIPrivacyFilterExperts")
    assert turn(made) is None
    layer = layer_of(made)
    assert not isinstance(layer, str)
    assert (layer.activation, layer.layout) == ("swigluoai", "concat")
    eager = copy.deepcopy(made)
    eager.config._experts_implementation = "eager"
    with torch.no_grad():
        torch.testing.assert_close(made(*routing(9)), eager(*routing(9)), rtol=1e-5, atol=1e-4)
    assert taken() == 1


def test_biases_of_another_type_stay() -> None:
    made = experts()
    made.down_proj_bias.data = made.down_proj_bias.data.double()
    assert layer_of(made) == "biases of another form"


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_saved_and_loaded_as_before(tmp_path: Path) -> None:
    made = MODEL.make()
    expected = MODEL.call(made)
    flashmoe_science.accelerate(made)
    made.save_pretrained(tmp_path)
    loaded = type(made).from_pretrained(tmp_path)
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, dict(loaded.named_parameters())[name]), name
    assert flashmoe_science.accelerate(loaded).experts == ("GptOssExperts",)
    with torch.no_grad():
        torch.testing.assert_close(MODEL.call(loaded), expected, rtol=0, atol=1e-5)
    assert taken()


def test_one_graph_holds_the_operator() -> None:
    """Whose gate and layout are constants of it."""
    made = experts().eval()
    assert turn(made) is None
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    arguments = routing(9)
    with torch.no_grad():
        expected = made(*arguments)
        torch._dynamo.reset()
        output = torch.compile(made, backend=backend, fullgraph=True)(*arguments)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    (graph,) = graphs
    (call,) = [node for node in graph.graph.nodes if "fused_moe" in str(node.target)]
    assert {"swigluoai", "interleaved"} <= {each for each in call.args if isinstance(each, str)} | {
        each for each in call.kwargs.values() if isinstance(each, str)
    }
