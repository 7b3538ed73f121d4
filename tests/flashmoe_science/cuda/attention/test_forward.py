"""A call of attention on CUDA, as far as it can be had on CPU tensors."""

from __future__ import annotations

import importlib

import pytest
import torch

from flashmoe_science.alike import never
from flashmoe_science.cuda.repeat import layout_of
from flashmoe_science.errors import InputError

forward = importlib.import_module(
    "flashmoe_science.cuda.attention.forward"
)  # the package has a function of this name


def tensors() -> list[torch.Tensor]:
    return [torch.zeros(2, 4, 8, 64, dtype=torch.bfloat16) for _ in range(3)]


def allocate(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype)


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_call_allocates_its_results_and_launches_on_them(return_lse: bool) -> None:
    launched: list[tuple[int, ...]] = []
    output = torch.empty(2, 8, 4, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    call = forward.prepare(
        layout_of(output), return_lse, lambda *addresses: launched.append(addresses), 0, allocate
    )
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
    call = forward.prepare(layout_of(q), False, lambda *addresses: None, 0, allocate)
    shifted = torch.zeros(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)
    with pytest.raises(InputError, match="key does not start at a multiple of 16"):
        call(q, shifted, v)


def test_a_scale_of_zero_is_a_query_times_zero() -> None:
    """0 times what is not finite is NaN; kernels are given a scale of 1, so that masked keys stay masked."""
    seen: list[torch.Tensor] = []
    q, k, v = tensors()
    q.fill_(3.0)
    q[0, 0, 0, 0], q[1, 2, 3, 4] = float("inf"), float("nan")
    forward._with_query_times_zero(lambda *given: seen.extend(given))(q, k, v)
    query, key, value = seen
    assert key is k
    assert value is v
    assert (query.isnan() == ~q.isfinite()).all()
    assert query.nan_to_num(0.0).eq(0).all()
    assert query.stride() == q.stride()
    problem = forward._problem(q, k, v, q, False, 0.0, False)
    assert problem.softmax_scale == 1.0
    assert forward._problem(q, k, v, q, False, -0.5, False).softmax_scale == -0.5
    assert forward._problem(q, k, v, q, False, None, False).softmax_scale == 0.125


class Lookups(dict[object, object]):
    """Counts what is asked of it."""

    count = 0

    def get(self, key: object, default: object = None) -> object:
        self.count += 1
        return super().get(key, default)


def test_a_call_that_autograd_records_is_recognised_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked up at first, then compared with the last. Calls without gradients keep a last one of their own."""
    lookups = Lookups()
    made = []

    def make_call(given: tuple[torch.Tensor, ...], options: tuple[object, ...], index: int) -> object:
        made.append(options)
        return lambda query, key, value: (query.detach(), key.detach())

    monkeypatch.setattr(forward, "current_device", lambda: -1)
    monkeypatch.setattr(forward.recorded, "_prepare", make_call)
    monkeypatch.setattr(forward.recorded, "ready", lookups)
    monkeypatch.setattr(forward.recorded, "recent", forward.recorded.recent)
    before = forward.calls.recent
    q, k, v = tensors()
    q.requires_grad_()
    with torch.no_grad():
        for _ in range(4):
            forward.forward(q, k, v, causal=True, return_lse=True)
        assert (len(made), lookups.count) == (
            1,
            3,
        )  # the first call asks a second time, once the device is current
        k.requires_grad_()  # not like the last one to who compares, and the same call
        forward.forward(q, k, v, causal=True, return_lse=True)
        forward.forward(q, k, v, causal=False, return_lse=True)
    assert [options[0] for options in made] == [True, False]
    assert forward.calls.recent is before
    with pytest.raises(InputError, match="requires a gradient"):
        forward.forward(q, k, v, causal=False, return_lse=True)


def test_a_call_that_autograd_is_to_record_is_like_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "current_device", lambda: -1)
    monkeypatch.setattr(forward.recorded, "_prepare", lambda *given: lambda q, k, v: (q.detach(), k.detach()))
    monkeypatch.setattr(forward.recorded, "ready", {})
    monkeypatch.setattr(forward.recorded, "recent", forward.recorded.recent)
    q, k, v = tensors()
    q.requires_grad_()
    assert forward.repeated(q, k, v, False, None) is None
    with torch.no_grad():
        for _ in range(2):
            forward.forward(q, k, v, softmax_scale=0.5, return_lse=True)
    if forward.recorded.recent[-2] is never:
        pytest.skip("this torch has no TensorGuards, or others than ours")
    call = forward.repeated(q, k, v, False, 0.5)
    assert call is forward.recorded.recent[-1]
    assert forward.repeated(q, k, v, False, 1 / 2) is call  # computed anew
    assert forward.repeated(q, k, v, True, 0.5) is None
    assert forward.repeated(q, k, v, 0, 0.5) is None
    assert forward.repeated(q, k, v, False, 1) is None
    assert forward.repeated(q.detach(), k, v, False, 0.5) is None
    assert forward.repeated(q, k[:1], v, False, 0.5) is None
    assert forward.repeated(q, k.clone().requires_grad_(), v, False, 0.5) is None
    with torch.no_grad():
        forward.forward(q, k, v, softmax_scale=0.5)
        forward.forward(q, k, v, softmax_scale=0.5)  # without what the backward pass needs
    assert forward.repeated(q, k, v, False, 0.5) is None
