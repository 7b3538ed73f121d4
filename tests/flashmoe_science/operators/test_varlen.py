"""attention_varlen as an operator: PyTorch's own checks, torch.compile without a break, modes, gradients refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from varlen_cases import Call, Shape, bounds, packed, paged

from flashmoe_science import InputError, attention_varlen
from flashmoe_science.operators.varlen import VARLEN

SHAPE = Shape((3, 1, 20), (10, 1, 33), value_dim=16)
INPUTS = ("cu_seqlens_q", "cu_seqlens_k", "block_table", "seqused_k", "sinks", "alibi_slopes")


def operands(call: Call) -> tuple[Any, ...]:
    return call["query"], call["key"], call["value"], *(call.get(name) for name in INPUTS), 20, 33


@pytest.mark.parametrize("call", [packed(SHAPE), paged(SHAPE, 16)], ids=["packed", "paged"])
def test_the_operator_passes_all_checks(call: Call) -> None:
    # Values are compared, and NaN equals nothing: slots without a key hold numbers here.
    call = {name: tensor.nan_to_num() for name, tensor in call.items()}
    call["sinks"] = torch.randn(4)
    opcheck(VARLEN, operands(call))
    opcheck(VARLEN, (*operands(call), False, 5, 2, 3.0, 0.5, 128))


def test_the_operator_is_what_the_function_does() -> None:
    call = paged(SHAPE, 16)
    options: dict[str, Any] = {"window": (7, 0), "softcap": 2.0, "sinks": torch.randn(4)}
    out, lse = attention_varlen(**call, **bounds(SHAPE), **options, return_lse=True)  # type: ignore[arg-type]
    result, its_lse = VARLEN(*operands({**call, "sinks": options["sinks"]}), True, 7, 0, 2.0)
    assert torch.equal(out, result)
    assert torch.equal(lse, its_lse)


def test_compiled_without_a_break_for_batches_that_change() -> None:
    def step(query: torch.Tensor, call: Call, most: int) -> torch.Tensor:
        others = {name: tensor for name, tensor in call.items() if name != "query"}
        out, lse = attention_varlen(
            query * 2, **others, max_seqlen_q=1, max_seqlen_k=most, window=(6, 0), return_lse=True
        )
        return out + lse[..., None]

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for sequences, length in ((2, 5), (3, 20), (5, 40)):
        call = paged(Shape((1,) * sequences, (length,) * sequences), 16)
        torch.testing.assert_close(compiled(call["query"], call, length), step(call["query"], call, length))


def test_compiled_into_a_tensor_of_the_caller() -> None:
    call = paged(SHAPE, 16)
    expected = attention_varlen(**call, **bounds(SHAPE))  # type: ignore[arg-type]
    out = torch.zeros_like(expected)
    torch._dynamo.reset()
    compiled = torch.compile(attention_varlen, fullgraph=True, backend="aot_eager")
    compiled(**call, **bounds(SHAPE), out=out)
    assert torch.equal(out, expected)


def test_compiled_into_a_tensor_that_does_not_fit() -> None:
    call = paged(SHAPE, 16)
    torch._dynamo.reset()
    compiled = torch.compile(attention_varlen, backend="aot_eager")
    for out, message in (
        (torch.zeros(24, 4, 16, dtype=torch.float64), "out is torch.float64"),
        (torch.zeros(1, 1, 16).expand(24, 4, 16), "several rows lie in the same memory"),
    ):
        with pytest.raises(InputError, match=message):
            compiled(**call, **bounds(SHAPE), out=out)


def test_shapes_without_memory() -> None:
    with FakeTensorMode() as mode:
        call = {name: mode.from_tensor(tensor) for name, tensor in packed(SHAPE).items()}
        out, lse = attention_varlen(**call, **bounds(SHAPE), return_lse=True)  # type: ignore[arg-type]
    assert out.shape == (24, 4, 16)
    assert lse.shape == (24, 4)
    assert lse.dtype == torch.float32


def test_a_mode_sees_the_call() -> None:
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    call = packed(SHAPE)
    with Watching():
        out = attention_varlen(**call, **bounds(SHAPE))  # type: ignore[arg-type]
    assert VARLEN in seen
    assert torch.equal(out, attention_varlen(**call, **bounds(SHAPE)))  # type: ignore[arg-type]


def test_gradients_are_refused() -> None:
    call = packed(SHAPE)
    call["query"].requires_grad_()
    with pytest.raises(InputError, match="attention_varlen has none"):
        VARLEN(*operands(call))
    with torch.no_grad():
        VARLEN(*operands(call))
    call = {**packed(SHAPE), "sinks": torch.zeros(4, requires_grad=True)}
    with pytest.raises(InputError, match="attention_varlen has none"):
        VARLEN(*operands(call))
