"""Which tensors are like those of an earlier call."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from flashmoe_science import alike


def tensors(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(2, 4, 8, 64, dtype=dtype) for _ in range(3)]


@pytest.fixture
def private_check() -> None:
    if alike.matcher(*tensors()) is alike.never:
        pytest.skip("this torch has no TensorGuards, or others than known")


@pytest.mark.usefixtures("private_check")
def test_like_tensors_match() -> None:
    matches = alike.matcher(*tensors())
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
    assert not alike.matcher(*tensors())(*changed)


@pytest.mark.usefixtures("private_check")
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_do_not_match(index: int, layout: torch.layout) -> None:
    """PyTorch's own check asks for their strides, which they do not have: that ended the process."""
    changed = tensors()
    changed[index] = torch.nested.nested_tensor(list(changed[index].unbind(0)), layout=layout)
    assert not alike.matcher(*tensors())(*changed)


@pytest.mark.usefixtures("private_check")
def test_tensors_that_require_a_gradient_never_match() -> None:
    needing = tensors()
    needing[2].requires_grad_()
    before = alike.matcher(*tensors())
    with torch.no_grad():
        during = alike.matcher(*needing)
    assert not before(*needing)
    assert not during(*needing)


def test_the_match_keeps_no_tensor_alive() -> None:
    given = tensors()
    matches = alike.matcher(*given)
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
    monkeypatch.setattr(alike, "private_guards", lambda: SimpleNamespace(TensorGuards=guards_type))
    alike._tensor_guards.cache_clear()
    try:
        assert alike.matcher(*tensors()) is alike.never
    finally:
        alike._tensor_guards.cache_clear()


@pytest.mark.usefixtures("private_check")
def test_what_is_never_recorded_may_require_a_gradient() -> None:
    given = tensors()
    given[0].requires_grad_()
    with torch.no_grad():
        matches = alike.matcher(*given, under_no_grad=True)
        assert matches(*given)
        assert not matches(*tensors())
