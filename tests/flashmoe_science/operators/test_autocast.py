"""The public functions under autocast: arguments are cast before an operator is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_reference import make_moe
from operator_calls import attention_tensors, differentiable

from flashmoe_science import DeviceError, InputError, flash_attention, fused_moe


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_attention_under_autocast(dtype: torch.dtype, compiled: bool) -> None:
    """Query as an fp32 norm leaves it, value as a projection does."""
    query, key, value = attention_tensors()
    value = value.to(dtype)

    def call(*tensors: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype):
            return flash_attention(*tensors, causal=True)

    expected = flash_attention(query.to(dtype), key.to(dtype), value, causal=True)
    function = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    assert torch.equal(function(query, key, value), expected)
    leaves = differentiable((query, key, value))
    function(*leaves).sum().backward()
    assert [leaf.grad.dtype for leaf in leaves if leaf.grad is not None] == [
        torch.float32,
        torch.float32,
        dtype,
    ]


def test_autocast_with_two_dtypes_and_the_same_shapes() -> None:
    """A call that is recognised as like the last one must not keep the last one's dtype."""
    tensors = attention_tensors(dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            assert flash_attention(*tensors).dtype == dtype  # type: ignore[union-attr]
    assert flash_attention(*tensors).dtype == torch.bfloat16  # type: ignore[union-attr]


def test_autocast_that_is_off_or_of_another_device_changes_nothing() -> None:
    tensors = attention_tensors()
    expected = flash_attention(*tensors)
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(flash_attention(*tensors), expected)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert torch.equal(flash_attention(*tensors), expected)
    finally:
        torch.set_autocast_enabled("cuda", False)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="float64"):
        flash_attention(*(tensor.double() for tensor in tensors))


def test_autocast_does_not_change_what_is_said_of_another_device() -> None:
    """PyTorch has no autocast for meta, and an error of its own for whoever asks."""
    tensors = tuple(tensor.to("meta") for tensor in attention_tensors())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(DeviceError, match="no kernel for meta"):
        flash_attention(*tensors)


def test_experts_under_autocast() -> None:
    hidden, w13, w2, weights, ids = make_moe(5, 32, 48, 4, 2).tensors
    expected = fused_moe(*(tensor.bfloat16() for tensor in (hidden, w13, w2)), weights, ids)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = weights.bfloat16()
        assert torch.equal(fused_moe(hidden, w13.bfloat16(), w2, weights, ids), expected)
        result = fused_moe(hidden, w13, w2, rounded, ids)
    assert torch.equal(
        result, fused_moe(hidden.bfloat16(), w13.bfloat16(), w2.bfloat16(), rounded.float(), ids)
    )
