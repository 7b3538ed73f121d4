"""The RMS norms that `accelerate` gives to PyTorch's one kernel, on the device where it has one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from models import MODELS

import flashmoe_science
from flashmoe_science.takeover.counts import Entry

pytest.importorskip("transformers", "5.8.1", reason="needs transformers 5.8.1")

from flashmoe_science.huggingface import norms

pytestmark = pytest.mark.usefixtures("one_thread")

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
TAKEN = ("llama", "qwen3", "qwen3_moe", "mixtral", "olmoe", "deepseek_v3")


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that these tests go through is the same; on a CPU PyTorch composes what it does."""
    monkeypatch.setattr(norms, "_devices", ("cpu", "cuda"))
    flashmoe_science.reset_report()


def accelerated(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Any, Any]:
    """A model with weights of its norms as training leaves them, and its twin as the library computes it."""
    library = MODELS[name].make().to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for each in norms_of(library):
            each.weight.copy_(1 + torch.randn(each.weight.shape, generator=generator) / 4)
    library = library.to(device)
    made = copy.deepcopy(library)
    result = flashmoe_science.accelerate(made)
    assert result.norms
    assert f"{result.norms[0]}: taken on GPUs" in str(result)
    flashmoe_science.reset_report()
    return made, library


def norms_of(model: Any) -> list[Any]:
    """In the order of the model, but the widest first: those of heads have other sizes."""
    every = [each for each in model.modules() if norms.is_norm(each)]
    return sorted(every, key=lambda each: -each.weight.shape[0])


def taken() -> int:
    return sum(
        count.calls
        for count in flashmoe_science.report().counts
        if count.entry is Entry.HUGGING_FACE_NORM and count.declined is None
    )


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", TAKEN)
def test_logits_and_every_gradient(name: str, device: str) -> None:
    made, library = accelerated(name, device=device)
    outputs = [MODELS[name].call(each) for each in (made, library)]
    weights = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(3)).to(device)
    for output in outputs:
        (output * weights).mean().backward()
    assert taken() == len(norms_of(library))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-5)
    right = dict(library.named_parameters())
    for parameter, each in made.named_parameters():
        if right[parameter].grad is not None:
            torch.testing.assert_close(each.grad, right[parameter].grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_no_less_exact_in_16_bits(dtype: torch.dtype, device: str) -> None:
    made, library = accelerated("qwen3", dtype, device)
    rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    ours, theirs = norms_of(made)[0], norms_of(library)[0]
    exact = rows.double() * (rows.double().square().mean(-1, keepdim=True) + theirs.variance_epsilon).rsqrt()
    exact = exact * theirs.weight.double()
    with torch.no_grad():
        errors = [(norm(rows).double() - exact).abs() / exact.abs() for norm in (ours, theirs)]
    assert taken() == 1
    assert errors[0].max() <= torch.finfo(dtype).eps
    assert errors[0].square().mean() <= errors[1].square().mean()


def test_a_shape_of_heads_and_no_rows() -> None:
    made, library = accelerated("qwen3")
    for shape in ((2, 3, 4, 64), (0, 64), (64,)):
        rows = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(norms_of(made)[0](rows), norms_of(library)[0](rows))
    assert taken() == 3


def test_they_can_be_left_to_the_library() -> None:
    made = MODELS["qwen3"].make()
    assert not flashmoe_science.accelerate(made, norms=False).norms
    assert not any("forward" in vars(each) for each in norms_of(made))


@pytest.mark.parametrize("name", ["gemma3"])
def test_a_class_that_norms_otherwise_stays(name: str) -> None:
    made = MODELS[name].make()
    result = flashmoe_science.accelerate(made)
    assert not result.norms
    assert ("Gemma3RMSNorm", "a norm of another form") in result.left or (
        "Gemma3RMSNorm",
        "its class norms otherwise",
    ) in result.left


def test_the_librarys_implementations_bring_its_norms_back() -> None:
    made, library = accelerated("qwen3_moe")
    made.set_attn_implementation("sdpa")
    made.set_experts_implementation("grouped_mm")
    rows = torch.randn(5, 64)
    with torch.no_grad():
        assert torch.equal(norms_of(made)[0](rows), norms_of(library)[0](rows))
    assert not taken()


def test_what_stays_with_the_library_call_by_call() -> None:
    made, library = accelerated("qwen3")
    ours, theirs = norms_of(made)[0], norms_of(library)[0]
    rows = torch.randn(5, 64)
    with torch.no_grad():
        assert torch.equal(ours(rows.bfloat16()), theirs(rows.bfloat16()))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ours(rows), theirs(rows))
    assert flashmoe_science.report().reasons(Entry.HUGGING_FACE_NORM) == {
        "a weight of another dtype": 1,
        "autocast, which would norm in float32": 1,
    }


def test_torch_compile_sees_the_librarys_code() -> None:
    """It fuses that itself."""
    made, library = accelerated("qwen3")
    norm = norms_of(made)[0]
    rows = torch.randn(5, 64)
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(rows), norms_of(library)[0](rows))
    assert not taken()


def test_copies_and_pickles_compute_the_same() -> None:
    made, _ = accelerated("qwen3")
    twin, pickled = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    assert norms_of(twin)[0].forward.__self__ is norms_of(twin)[0]
    with torch.no_grad():
        expected, one, other = (MODELS["qwen3"].call(each) for each in (made, twin, pickled))
    torch.testing.assert_close(one, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(other, expected, rtol=0, atol=1e-6)


def test_a_hook_of_somebody_else_stays() -> None:
    made = MODELS["qwen3"].make()
    hooked = norms_of(made)[0]
    hooked.forward = lambda rows: rows
    result = flashmoe_science.accelerate(made)
    assert (type(hooked).__name__, "a norm that somebody else's hook calls") in result.left
    assert hooked.forward(rows := torch.randn(3, 64)) is rows


class GroupedRMSNorm(torch.nn.Module):
    """As Qwen4's: the size of a group is of the instance."""

    def __init__(self, size: int, group: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.group, self.eps = group, 1e-6

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        groups = rows.float().unflatten(-1, (-1, self.group))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight).to(rows.dtype)


@pytest.mark.parametrize("groups", [(8, 4), (4, 8)])
def test_settings_of_an_instance_count(groups: tuple[int, int]) -> None:
    model = MODELS["qwen3"].make()
    for layer, group in zip(model.model.layers, groups, strict=True):
        layer.further = torch.nn.ModuleList([GroupedRMSNorm(8, group), GroupedRMSNorm(8, group)])
    result = flashmoe_science.accelerate(model)
    assert ("GroupedRMSNorm", "its class norms otherwise") in result.left
    for layer, group in zip(model.model.layers, groups, strict=True):
        assert [norms._ATTRIBUTE in vars(norm) for norm in layer.further] == [group == 8] * 2
