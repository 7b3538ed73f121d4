"""Calls of flash_attention on the CPU that are like an earlier one: recognised, and never taken for another."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flashmoe_science import InputError, alike, flash_attention
from flashmoe_science.cpu import attention

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(seqlen: int = 9, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, 2, seqlen, 16, generator=generator).to(dtype) for _ in range(3))
    return query, key, value


@pytest.fixture(autouse=True)
def nothing_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    if alike.matcher(*inputs()) is alike.never:
        pytest.skip("this torch has no TensorGuards, or others than ours")
    monkeypatch.setattr(attention, "_thread", attention._OfThread())
    monkeypatch.setattr(attention, "_plans", {})


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A call that was not recognised appears here."""
    calls: list[object] = []
    remember = attention._remember

    def counted(*arguments: Any) -> None:
        calls.append(arguments)
        remember(*arguments)

    monkeypatch.setattr(attention, "_remember", counted)
    return calls


def afresh(tensors: Tensors, **options: Any) -> Any:
    """The same by the look-up."""
    attention._thread.last = attention._NOTHING
    attention._thread.by_shape.clear()
    return flash_attention(*tensors, **options)


def equal(one: Any, other: Any) -> bool:
    pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"return_lse": True}, {"softmax_scale": 0.3}])
def test_calls_of_a_kind_are_looked_up_once(options: dict[str, Any], looked_up: list[object]) -> None:
    layers = [inputs(seed=seed) for seed in range(4)]
    results = [flash_attention(*layer, **options) for layer in layers]
    assert len(looked_up) == 1
    for layer, result in zip(layers, results, strict=True):
        assert equal(result, afresh(layer, **options))


def test_a_result_is_new_memory_each_time() -> None:
    tensors = inputs()
    first, second, third = (flash_attention(*tensors) for _ in range(3))
    assert len({first.data_ptr(), second.data_ptr(), third.data_ptr()}) == 3


def test_shapes_that_take_turns_are_looked_up_once_each(looked_up: list[object]) -> None:
    short, long = inputs(5), inputs(40)
    results = [flash_attention(*tensors) for tensors in (short, long) * 3]
    assert len(looked_up) == 2
    for result, tensors in zip(results, (short, long) * 3, strict=True):
        assert torch.equal(result, afresh(tensors))


def test_a_shape_that_comes_again_after_turns_is_compared_first() -> None:
    short, long = inputs(5), inputs(40)
    for tensors in (short, long) * 2:
        flash_attention(*tensors)
    assert attention._thread.takes_turns
    for _ in range(2):
        flash_attention(*long)
    assert not attention._thread.takes_turns
    attention._thread.by_shape.clear()
    assert torch.equal(flash_attention(*long), afresh(long))


def test_options_that_take_turns_are_looked_up_once_each(looked_up: list[object]) -> None:
    tensors = inputs()
    for _ in range(3):
        flash_attention(*tensors, causal=True)
        flash_attention(*tensors)
        flash_attention(*tensors, return_lse=True)
    assert len(looked_up) == 3


def test_a_scale_is_compared_by_its_value(looked_up: list[object]) -> None:
    tensors = inputs()
    results = [flash_attention(*tensors, softmax_scale=1 / number) for number in (2, 2)]
    assert len(looked_up) == 1
    assert torch.equal(*results)
    assert not torch.equal(flash_attention(*tensors, softmax_scale=0.7), results[0])


OTHERS: dict[str, Callable[[Tensors], Tensors]] = {
    "another dtype": lambda given: (given[0].double().float(), given[1].bfloat16(), given[2].bfloat16()),
    "another value's shape": lambda given: (given[0], given[1], given[2][:, :, :4]),
    "another device": lambda given: (given[0], given[1], given[2].to("meta")),
    "a last dimension apart": lambda given: (given[0], given[1], given[2].mT.contiguous().mT),
    "nested": lambda given: (
        torch.nested.nested_tensor(list(given[0].unbind(0)), layout=torch.strided),
        given[1],
        given[2],
    ),
    "sparse": lambda given: (given[0].to_sparse(), given[1], given[2]),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("turns", [False, True], ids=["after one", "after two in turn"])
def test_what_is_refused_is_refused_after_calls_that_were_not(
    change: Callable[[Tensors], Tensors], turns: bool
) -> None:
    tensors = inputs()
    flash_attention(*tensors)
    if turns:
        flash_attention(*inputs(5))
    with pytest.raises(InputError):
        flash_attention(*change(tensors))


@pytest.mark.parametrize("options", [{"causal": 1}, {"softmax_scale": float("nan")}, {"softmax_scale": [1]}])
def test_options_that_only_equal_good_ones_are_refused(options: dict[str, Any]) -> None:
    tensors = inputs()
    flash_attention(*tensors, causal=True)
    flash_attention(*tensors, softmax_scale=1.0)
    with pytest.raises(InputError):
        flash_attention(*tensors, **options)


def test_strides_of_one_shape_are_told_apart(looked_up: list[object]) -> None:
    tensors = inputs()
    turned = tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors)
    for _ in range(2):
        dense, other = flash_attention(*tensors), flash_attention(*turned)
        assert torch.equal(dense, other)
        assert dense.stride() == tensors[0].stride()
        assert other.stride() == turned[0].stride()
    assert len(looked_up) == 4


def test_one_tensor_in_two_places_is_looked_up_and_right() -> None:
    query, key, _ = inputs()
    flash_attention(*inputs())
    assert torch.equal(flash_attention(query, key, key), flash_attention(query, key, key.clone()))


def test_what_requires_a_gradient_is_recorded_after_calls_that_were_not(looked_up: list[object]) -> None:
    query, key, value = inputs()
    query.requires_grad_()
    with torch.no_grad():
        results = [flash_attention(query, key, value) for _ in range(3)]
    assert len(looked_up) == 1
    recorded = flash_attention(query, key, value)
    assert torch.equal(recorded, results[0])
    assert recorded.requires_grad
    assert not results[2].requires_grad
    detached = flash_attention(query.detach(), key, value)
    assert not detached.requires_grad


def test_inference_mode_has_calls_of_its_own(looked_up: list[object]) -> None:
    tensors = inputs()
    for _ in range(2):
        flash_attention(*tensors)
    with torch.inference_mode():
        made = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]
        results = [flash_attention(*made) for _ in range(3)]
    assert len(looked_up) == 2
    assert all(result.is_inference() for result in results)
    assert torch.equal(results[2], flash_attention(*tensors))


def test_autocast_casts_after_calls_that_did_not() -> None:
    tensors = inputs()
    for _ in range(2):
        flash_attention(*tensors)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            attention.forward(*tensors, causal=False, softmax_scale=None, return_lse=False)
            for _ in range(2):
                assert flash_attention(*tensors).dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.float16):
            assert flash_attention(*tensors).dtype == torch.float16
        assert flash_attention(*tensors).dtype == torch.float32


def test_tensors_that_autocast_leaves_are_repeatable(looked_up: list[object]) -> None:
    tensors = inputs(dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [flash_attention(*tensors) for _ in range(3)]
    assert len(looked_up) == 1
    with torch.autocast("cpu", dtype=torch.float16):
        assert flash_attention(*tensors).dtype == torch.float16
    assert torch.equal(flash_attention(*tensors), results[2])


def test_calls_of_the_operator_leave_eager_ones_repeatable(looked_up: list[object]) -> None:
    tensors = inputs()
    expected, _ = torch.ops.flashmoe_science.flash_attention_forward(*tensors)
    results = [flash_attention(*tensors) for _ in range(3)]
    assert len(looked_up) == 1
    assert torch.equal(results[2], expected)


def test_memory_that_was_freed_is_named_in_a_repeated_call() -> None:
    tensors = inputs()
    flash_attention(*tensors)
    gone = torch.randn_like(tensors[1])
    gone.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="key has no memory"):
        flash_attention(tensors[0], gone, tensors[2])


def test_a_call_that_may_be_repeated_keeps_what_it_reads() -> None:
    flash_attention(*inputs())
    (plan,) = attention._plans.values()
    read = weakref.ref(plan.problem)
    del plan
    attention._plans.clear()
    gc.collect()
    assert read() is not None


def test_threads_have_calls_of_their_own(looked_up: list[object]) -> None:
    tensors, results = inputs(), []
    for _ in range(2):
        thread = threading.Thread(
            target=lambda: results.extend((flash_attention(*tensors), flash_attention(*tensors)))
        )
        thread.start()
        thread.join()
    assert len(looked_up) == 2
    assert all(torch.equal(result, results[0]) for result in results)


def test_numpys_bools_are_taken_as_ever() -> None:
    tensors = inputs()
    causal: Any = np.True_
    expected = flash_attention(*tensors, causal=True)
    assert torch.equal(flash_attention(*tensors, causal=causal), expected)


def test_without_pytorchs_check_calls_are_looked_up_and_right(
    monkeypatch: pytest.MonkeyPatch, looked_up: list[object]
) -> None:
    monkeypatch.setattr(attention, "matcher", lambda *tensors, under_no_grad: alike.never)
    tensors = inputs()
    results = [flash_attention(*tensors) for _ in range(3)]
    assert len(looked_up) == 3
    assert torch.equal(results[0], results[2])
