"""The steady state of a CUDA call, as far as it can be had on CPU tensors: what is like the last call, and the call."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from flashmoe_science.cuda import repeat
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


@pytest.mark.parametrize("found", [None, _Careless, _OtherArguments, object])
def test_an_unknown_check_is_not_used(found: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "_private", lambda: SimpleNamespace(TensorGuards=found))
    repeat._tensor_guards.cache_clear()
    try:
        assert repeat.matcher(*tensors()) is repeat.never
    finally:
        repeat._tensor_guards.cache_clear()


def allocate(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype)


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_call_allocates_its_results_and_launches_on_them(return_lse: bool) -> None:
    launched: list[tuple[int, ...]] = []
    output = torch.empty(2, 8, 4, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    call = repeat.prepare(output, return_lse, lambda *addresses: launched.append(addresses), 0, allocate)
    q, k, v = tensors()
    out, lse = call(q, k, v)
    assert (out.shape, out.stride(), out.dtype) == (output.shape, output.stride(), torch.bfloat16)
    assert (lse is not None) == return_lse
    lse_address = 0
    if lse is not None:
        assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 4, 8), torch.float32, True)
        lse_address = lse.data_ptr()
    assert launched == [(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse_address, 0)]


def test_misaligned_tensors_are_named() -> None:
    q, k, v = tensors()
    call = repeat.prepare(q, False, lambda *addresses: None, 0, allocate)
    shifted = torch.zeros(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)
    with pytest.raises(InputError, match="key does not start at a multiple of 16"):
        call(q, shifted, v)
