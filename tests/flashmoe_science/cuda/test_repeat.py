"""The steady state of a CUDA call, as far as it can be had on CPU tensors: what is like the last call, and the call."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashmoe_science.cuda import repeat
from flashmoe_science.cuda.launch import Launch, LaunchPlan
from flashmoe_science.errors import InputError


def tensors(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(2, 4, 8, 64, dtype=dtype) for _ in range(3)]


@pytest.fixture
def private_check() -> None:
    if repeat.matcher(*tensors()) is repeat.never:
        pytest.skip("this torch has no TensorGuards, or others than known")


@pytest.mark.usefixtures("private_check")
def test_like_tensors_match() -> None:
    matches = repeat.matcher(*tensors())
    assert matches(*tensors())


@pytest.mark.usefixtures("private_check")
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 4, 9, 64, dtype=torch.bfloat16),
        torch.zeros(2, 8, 4, 64, dtype=torch.bfloat16).transpose(1, 2),
        torch.zeros(2, 4, 8, 72, dtype=torch.bfloat16)[..., :64],
        torch.zeros(2, 4, 8, 64, dtype=torch.float16),
        torch.zeros(2, 4, 8, 64, dtype=torch.bfloat16, device="meta"),
        torch.zeros(2, 4, 8, 64, dtype=torch.bfloat16, requires_grad=True),
        torch.zeros(2, 4, 8, 64, dtype=torch.bfloat16).to_sparse(),
        torch.zeros(8, 8, 64, dtype=torch.bfloat16),
        None,
        "query",
    ],
    ids=lambda other: str(getattr(other, "shape", other)),
)
def test_others_do_not_match(index: int, other: torch.Tensor) -> None:
    changed = tensors()
    changed[index] = other
    assert not repeat.matcher(*tensors())(*changed)


@pytest.mark.usefixtures("private_check")
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_do_not_match(index: int, layout: torch.layout) -> None:
    """PyTorch's own check asks for their strides, which they do not have: that ended the process."""
    changed = tensors()
    changed[index] = torch.nested.nested_tensor(list(changed[index].unbind(0)), layout=layout)
    assert not repeat.matcher(*tensors())(*changed)


@pytest.mark.usefixtures("private_check")
def test_tensors_that_require_a_gradient_never_match() -> None:
    needing = tensors()
    needing[2].requires_grad_()
    before = repeat.matcher(*tensors())
    with torch.no_grad():
        during = repeat.matcher(*needing)
    assert not before(*needing)
    assert not during(*needing)


def test_the_match_keeps_no_tensor_alive() -> None:
    given = tensors()
    matches = repeat.matcher(*given)
    alive = weakref.ref(given[0])
    del given
    gc.collect()
    assert alive() is None
    assert not matches(*tensors(torch.float16))


class _Careless:
    """A check that accepts everything."""

    def __init__(
        self, *given: torch.Tensor, dynamic_dims_sizes: object, dynamic_dims_strides: object
    ) -> None:
        pass

    def check(self, *given: torch.Tensor) -> bool:
        return True


class _OtherArguments:
    def __init__(self, *given: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize("guards_type", [None, _Careless, _OtherArguments, object])
def test_an_unknown_check_is_not_used(guards_type: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "_private", lambda: SimpleNamespace(TensorGuards=guards_type))
    repeat._tensor_guards.cache_clear()
    try:
        assert repeat.matcher(*tensors()) is repeat.never
    finally:
        repeat._tensor_guards.cache_clear()


def allocate(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype)


@pytest.mark.usefixtures("private_check")
def test_what_is_never_recorded_may_require_a_gradient() -> None:
    given = tensors()
    given[0].requires_grad_()
    with torch.no_grad():
        matches = repeat.matcher(*given, under_no_grad=True)
        assert matches(*given)
        assert not matches(*tensors())


INPUTS = {"left": 16, "right": 4}


def layout(*sizes: int, dtype: torch.dtype = torch.float32) -> repeat.Layout:
    return repeat.layout_of(torch.empty(sizes, dtype=dtype, device="meta"))


def ready(launch: Launch, *results: repeat.Layout | None, workspace_bytes: int = 0) -> repeat.Call:
    return repeat.prepare(INPUTS, results, LaunchPlan(launch, workspace_bytes), 0, allocate)


def test_a_call_allocates_its_results_and_launches_on_them() -> None:
    launched: list[tuple[int, ...]] = []
    call = ready(
        lambda *addresses: launched.append(addresses),
        layout(2, 3),
        None,
        layout(5, dtype=torch.float16),
        workspace_bytes=256,
    )
    left, right = torch.zeros(4), torch.zeros(6)
    first, absent, last = call(left, right)
    assert absent is None
    assert (first.shape, first.dtype, last.shape, last.dtype) == ((2, 3), torch.float32, (5,), torch.float16)
    (*given, workspace, stream) = launched[0]
    assert given == [left.data_ptr(), right.data_ptr(), first.data_ptr(), 0, last.data_ptr()]
    assert workspace not in (0, *given)
    assert stream == 0


def test_misaligned_tensors_are_named() -> None:
    call = ready(lambda *addresses: None)
    left, right = torch.zeros(8), torch.zeros(8)
    assert call(left, right[1:]) == ()
    with pytest.raises(InputError, match="left does not start at a multiple of 16"):
        call(left[1:], right)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_what_has_no_memory_is_named_and_not_launched() -> None:
    """A kernel that reads address 0 takes the process's use of the GPU with it."""
    launched: list[tuple[int, ...]] = []
    call = ready(lambda *addresses: launched.append(addresses))
    with FakeTensorMode():
        fake = torch.zeros(8)
    with pytest.raises(InputError, match="right has no memory"):
        call(torch.zeros(8), fake)
    assert launched == []
    call(torch.zeros(8), torch.zeros(0))
    assert len(launched) == 1
