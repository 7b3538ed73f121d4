"""Training steps of flash_attention on the CPU that are like the last one: recognised, and never taken for another."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from flashmoe_science import InputError, alike, flash_attention
from flashmoe_science.cpu import attention, attention_backward

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(
    seqlen: int = 9, *, seed: int = 0, dtype: torch.dtype = torch.float32, needed: str = "qkv"
) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, 2, seqlen, 16, generator=generator).to(dtype).requires_grad_(name in needed)
        for name in "qkv"
    )
    return query, key, value


def step(tensors: Tensors, *, of_lse: bool = False, transposed: bool = False, **options: Any) -> Tensors:
    """The gradients of one step."""
    output, lse = flash_attention(*tensors, return_lse=True, **options)
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(output.shape, generator=generator).to(output.dtype)
    if transposed:
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    needed = [tensor for tensor in tensors if tensor.requires_grad]
    if of_lse:
        return torch.autograd.grad((output, lse), needed, (grad, torch.ones_like(lse)))  # type: ignore[return-value]
    return torch.autograd.grad(output, needed, grad)  # type: ignore[return-value]


def forget(patch: pytest.MonkeyPatch) -> None:
    for module in (attention, attention_backward):
        patch.setattr(module, "_thread", module._OfThread())
        patch.setattr(module, "_plans", {})


@pytest.fixture(autouse=True)
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A pass that was not recognised appears here."""
    if alike.matcher(*inputs(needed="")) is alike.never:
        pytest.skip("this torch has no TensorGuards, or others than ours")
    forget(monkeypatch)
    passes: list[str] = []
    remember, caller = attention._remember, attention_backward._caller

    def forward(*arguments: Any) -> None:
        passes.append("forward")
        remember(*arguments)

    def backward(*arguments: Any) -> Any:
        passes.append("backward")
        return caller(*arguments)

    monkeypatch.setattr(attention, "_remember", forward)
    monkeypatch.setattr(attention_backward, "_caller", backward)
    return passes


def test_steps_like_the_one_before_are_recognised(looked_up: list[str]) -> None:
    for seed in range(5):
        step(inputs(seed=seed))
    assert looked_up == ["forward", "backward"]


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"seqlen": 10}, {}),
        ({"dtype": torch.bfloat16}, {}),
        ({"needed": "v"}, {}),
        ({"needed": "qk"}, {}),
        ({}, {"causal": True}),
        ({}, {"softmax_scale": 0.5}),
        ({}, {"of_lse": True}),
        ({}, {"transposed": True}),
    ],
    ids=str,
)
def test_another_step_is_not_taken_for_it(
    given: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, others = inputs(), inputs(**given, seed=1)
    alone = [step(others, **options)]
    forget(monkeypatch)
    alone.append(step(tensors))
    for _ in range(2):
        for each, expected, how in ((tensors, alone[1], {}), (others, alone[0], options)):
            assert all(torch.equal(*pair) for pair in zip(step(each, **how), expected, strict=True))


def test_a_tensor_without_memory_is_refused_by_a_step_that_is_recognised() -> None:
    step(inputs())
    output = flash_attention(*inputs())
    assert isinstance(output, torch.Tensor)
    grad = torch.ones_like(output)
    grad.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="grad_output has no memory"):
        output.backward(grad)


def test_a_thread_s_last_step_keeps_what_its_kernel_reads() -> None:
    """Plans are forgotten where there are too many of them, by any thread."""
    tensors = inputs()
    expected = step(tensors)
    (plan,) = attention_backward._plans.values()
    problem = weakref.ref(plan.problem)
    del plan
    attention_backward._plans.clear()
    gc.collect()
    assert problem() is not None
    assert all(torch.equal(*pair) for pair in zip(step(tensors), expected, strict=True))


def test_inference_beside_training_keeps_both_right(looked_up: list[str]) -> None:
    tensors = inputs()
    expected = flash_attention(*tensors)
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(flash_attention(*tensors), expected)  # type: ignore[arg-type]
            _, lse = flash_attention(*tensors, return_lse=True)
            assert not lse.requires_grad
        output = flash_attention(*tensors)
        assert isinstance(output, torch.Tensor)
        assert output.requires_grad
        output.sum().backward()


def test_each_thread_has_a_last_step_of_its_own() -> None:
    tensors = inputs()
    expected = step(tensors)
    results: list[Tensors] = []
    other = threading.Thread(target=lambda: results.append(step(inputs(11))) or results.append(step(tensors)))
    other.start()
    other.join()
    assert all(torch.equal(*pair) for pair in zip(results[1], expected, strict=True))
    assert all(torch.equal(*pair) for pair in zip(step(tensors), expected, strict=True))
