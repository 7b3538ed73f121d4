"""A call on CUDA, as far as it can be had on CPU tensors: what is refused before anything is launched."""

from __future__ import annotations

import importlib

import pytest
import torch
from moe_reference import make_moe
from torch._subclasses.fake_tensor import FakeTensorMode

from flashmoe_science.cuda import repeat
from flashmoe_science.cuda.launch import LaunchPlan
from flashmoe_science.errors import InputError
from flashmoe_science.moe_arguments import Activation, W13Layout

forward = importlib.import_module(
    "flashmoe_science.cuda.moe.forward"
)  # the package has a function of this name

OPTIONS = (Activation.SILU, W13Layout.CONCAT, None, (*forward.FIVE, "out"))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What would have been launched, with the GPU's own parts taken out."""
    made: list[tuple[int, ...]] = []
    planned = LaunchPlan(lambda *addresses: made.append(addresses), workspace_bytes=1024)
    monkeypatch.setattr(forward, "make_context_current", lambda device: None)
    monkeypatch.setattr(forward, "device_of", lambda device: None)
    monkeypatch.setattr(forward, "plan", lambda problem, device, choice: planned)
    monkeypatch.setattr(repeat, "raw_stream", lambda device: 7)
    monkeypatch.setattr(
        forward,
        "cuda_allocator",
        lambda: lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype),
    )
    return made


def given() -> list[torch.Tensor]:
    tensors = list(make_moe(6, 32, 48, 4, 2, dtype=torch.bfloat16).tensors)
    tensors[4] = tensors[4].int()
    return tensors


def ready(tensors: list[torch.Tensor]) -> repeat.Call:
    """As for tensors like these, before they are changed."""
    return forward._make_call(tuple(tensors), OPTIONS, 0)


def test_the_addresses_of_a_launch(launches: list[tuple[int, ...]]) -> None:
    tensors = given()
    out = torch.empty_like(tensors[0])
    assert forward._make_call((*tensors, out), OPTIONS, 0)(*tensors, out) == ()
    addresses = [tensor.data_ptr() for tensor in (*tensors, out)]
    assert [(*launch[:6], launch[7]) for launch in launches] == [(*addresses, 7)]


def test_biases_come_behind_the_five_and_before_the_output(launches: list[tuple[int, ...]]) -> None:
    made = make_moe(6, 32, 48, 4, 2, dtype=torch.bfloat16, biased=True)
    tensors = (*made.tensors, *made.biases.values())
    options = (*OPTIONS[:3], (*forward.FIVE, "w13_bias", "w2_bias"))
    (result,) = forward._make_call(tensors, options, 0)(*tensors)
    (launch,) = launches
    assert launch[:8] == tuple(tensor.data_ptr() for tensor in (*tensors, result))


NAMES = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids", "out")


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("index", range(6), ids=NAMES)
def test_what_has_no_memory_is_not_launched(index: int, launches: list[tuple[int, ...]]) -> None:
    """Also where a call of these shapes was made before: kernels that read address 0 take the context with them."""
    tensors = given()
    tensors.append(torch.empty_like(tensors[0]))
    call = ready(tensors)
    call(*tensors)
    launches.clear()
    with FakeTensorMode():
        tensors[index] = torch.empty(tensors[index].shape, dtype=tensors[index].dtype)
    with pytest.raises(InputError, match=f"{NAMES[index]} has no memory"):
        call(*tensors)
    assert launches == []


@pytest.mark.parametrize("index", [0, 1, 2, 5])
def test_what_is_not_aligned_is_not_launched(index: int, launches: list[tuple[int, ...]]) -> None:
    tensors = given()
    tensors.append(torch.empty_like(tensors[0]))
    moved = torch.empty(tensors[index].numel() + 1, dtype=torch.bfloat16)[1:]
    tensors[index] = moved.view(tensors[index].shape)
    with pytest.raises(InputError, match=f"{NAMES[index]} does not start at a multiple of 16 bytes"):
        ready(tensors)(*tensors)
    assert launches == []


def test_overlapping_outputs_are_not_launched(launches: list[tuple[int, ...]]) -> None:
    tensors = given()
    with pytest.raises(InputError, match="out shares memory with hidden_states"):
        ready([*tensors, tensors[0]])(*tensors, tensors[0])
    assert launches == []
