"""The kernels under torch.nn.attention.activate_flash_attention_impl: PyTorch's own operators, replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import attention
from torch.nn.functional import scaled_dot_product_attention  # by name: what `sdpa` does not reach

import flashmoe_science
from flashmoe_science.takeover import implementation
from flashmoe_science.takeover.counts import Entry

if not hasattr(attention, "register_flash_attention_impl"):
    pytest.skip("this PyTorch has no registry of implementations", allow_module_level=True)


@contextmanager
def active() -> Iterator[None]:
    flashmoe_science.register_flash_attention_impl()
    handle = implementation._activate()
    try:
        yield
    finally:
        handle.remove()


@pytest.fixture(autouse=True)
def _kernel() -> None:
    tensor = torch.zeros(1, 1, 1, 8)
    try:
        flashmoe_science.flash_attention(tensor, tensor, tensor)
    except flashmoe_science.DeviceError as error:
        pytest.skip(str(error))
    flashmoe_science.reset_report()


def sample(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_gradients(call: Callable[..., Any], *tensors: torch.Tensor) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = call(*leaves)
    output = output[0] if isinstance(output, tuple) else output
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


def counts() -> list[tuple[int, str | None]]:
    return [(count.calls, count.declined) for count in flashmoe_science.report().counts]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_calls_and_gradients_are_taken(causal: bool, transposed: bool) -> None:
    tensors = [sample(2, 4, 9, 16, seed=seed) for seed in range(3)]
    if transposed:
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]

    def call(*leaves: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(*leaves, is_causal=causal, scale=0.3)

    expected = with_gradients(call, *tensors)
    with active():
        result = with_gradients(call, *tensors)
        assert counts() == [(2, None)]
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert one.stride() == other.stride()
    with_gradients(call, *tensors)
    assert counts() == [(2, None)]


def test_what_is_declined_is_pytorchs() -> None:
    query = sample(1, 2, 7, 16)
    mask = torch.ones(7, 7, dtype=torch.bool).tril(2)

    def masked(*leaves: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(*leaves, attn_mask=mask)

    def doubles(*leaves: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(*(leaf.double() for leaf in leaves))

    for call, reason in ((masked, "a mask"), (doubles, "float64 on cpu")):
        expected = with_gradients(call, query, query, query)
        flashmoe_science.reset_report()
        with active():
            result = with_gradients(call, query, query, query)
        assert all(torch.equal(*pair) for pair in zip(result, expected, strict=True))
        assert counts() == [(2, reason)]
        assert flashmoe_science.report().reasons(Entry.FLASH_IMPLEMENTATION) == {reason: 2}


def test_pytorch_activates_and_restores_it() -> None:
    flashmoe_science.register_flash_attention_impl()
    assert implementation.NAME in attention.list_flash_attention_impls()
    if not hasattr(attention, "restore_flash_attention_impl"):
        pytest.skip("this PyTorch cannot restore its own")
    query = sample(1, 2, 7, 16)
    attention.activate_flash_attention_impl(implementation.NAME)
    try:
        scaled_dot_product_attention(query, query, query)
    finally:
        attention.restore_flash_attention_impl()
    scaled_dot_product_attention(query, query, query)
    assert counts() == [(1, None)]


def test_compiled_code_is_reached_without_compiling_again() -> None:
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    tensors = [sample(1, 2, 8, 16, seed=seed) for seed in range(3)]
    expected = with_gradients(compiled, *tensors)
    with active():
        result = with_gradients(compiled, *tensors)
    assert counts() == [(2, None)]
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["flash", "cudnn"])
def test_the_operators_of_cuda(kind: str) -> None:
    """Their functions, on tensors of the CPU: the same results, in the shapes that autograd and the backward expect."""
    tensors = [sample(2, 4, 9, 16, seed=seed) for seed in range(3)]
    backend, operators = implementation._BACKENDS["CPU"], implementation._OPERATORS["CUDA"]
    forward = operators[f"_scaled_dot_product_{kind}_attention"]
    backward = operators[f"_scaled_dot_product_{kind}_attention_backward"]
    between = (None, True) if kind == "cudnn" else ()
    results = forward(backend, *tensors, *between, 0.0, True, scale=0.3)
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention").default
    meta = operator(*(tensor.to("meta") for tensor in tensors), *between, 0.0, True, scale=0.3)
    for result, expected in zip(results, meta, strict=True):
        if isinstance(expected, torch.Tensor):
            assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        else:
            assert result == expected
    output, lse, first, second, max_q, max_k, seed, offset, _ = results
    grad_output = 2 * output
    if kind == "flash":
        rest = (first, second, max_q, max_k, 0.0, True, seed, offset)
    else:
        rest = (seed, offset, None, first, second, max_q, max_k, 0.0, True)
    gradients = backward(backend, grad_output, *tensors, output, lse, *rest, scale=0.3)

    def call(*leaves: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(*leaves, is_causal=True, scale=0.3)

    for one, other in zip((output, *gradients), with_gradients(call, *tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    declined = (None, True) if kind == "cudnn" else ()
    assert forward(backend, *tensors, *declined, 0.5) == "dropout"
