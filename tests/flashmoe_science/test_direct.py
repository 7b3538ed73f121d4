"""Calls whose tensors' memory does not hold their numbers, or that are recorded: right by way of the operators, or
refused in one line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_reference import make_moe
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from flashmoe_science import InputError, flash_attention, fused_moe, topk_routing

Call = Callable[..., Any]


def first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def attention() -> tuple[Call, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return flash_attention, [torch.randn(1, 2, 20, 32, generator=generator) for _ in range(3)]


def moe() -> tuple[Call, list[torch.Tensor]]:
    return fused_moe, list(make_moe(5, 32, 48, 4, 2).tensors)


def routing() -> tuple[Call, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def call(logits: torch.Tensor) -> Any:
        return topk_routing(logits, 2)

    return call, [torch.randn(5, 8, generator=generator)]


each_function = pytest.mark.parametrize("make", [attention, moe, routing], ids=lambda make: make.__name__)


def refused(call: Call, *arguments: Any, match: str) -> None:
    with pytest.raises(InputError, match=match) as raised:
        call(*arguments)
    text = str(raised.value)
    assert "\n" not in text
    assert ";" in text or ":" in text


def tensors_of(arguments: list[torch.Tensor]) -> list[int]:
    return [index for index, tensor in enumerate(arguments) if tensor.is_floating_point()]


@pytest.fixture(params=[False, True], ids=["cold", "warm"], autouse=True)
def _warm(request: pytest.FixtureRequest) -> None:
    """A plan that was made for plain tensors of the same shapes must not let others through."""
    if request.param:
        for make in (attention, moe, routing):
            call, arguments = make()
            call(*arguments)


@each_function
def test_a_jit_trace(make: Callable[[], tuple[Call, list[torch.Tensor]]]) -> None:
    call, arguments = make()
    traced = torch.jit.trace(lambda *tensors: first(call(*tensors)) + 1, tuple(arguments))
    others = [tensor.flip(0) for tensor in arguments]
    assert torch.equal(traced(*others), first(call(*others)) + 1)
    assert "flashmoe_science::" in str(traced.graph)


@each_function
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(make: Callable[[], tuple[Call, list[torch.Tensor]]], mode: str) -> None:
    call, arguments = make()
    graph = make_fx(lambda *tensors: first(call(*tensors)), tracing_mode=mode)(*arguments)
    assert "flashmoe_science" in graph.code
    others = [tensor.flip(0) for tensor in arguments]
    assert torch.equal(graph(*others), first(call(*others)))


@each_function
def test_a_negative_bit(make: Callable[[], tuple[Call, list[torch.Tensor]]]) -> None:
    call, arguments = make()
    for index in tensors_of(arguments):
        changed, plain = list(arguments), list(arguments)
        changed[index], plain[index] = torch._neg_view(arguments[index]), -arguments[index]
        assert torch.equal(first(call(*changed)), first(call(*plain)))
        changed[index] = torch.view_as_complex(
            torch.stack([arguments[index], arguments[index]], dim=-1)
        ).conj()
        refused(call, *changed, match="dtype")


@each_function
def test_a_zero_tensor(make: Callable[[], tuple[Call, list[torch.Tensor]]]) -> None:
    call, arguments = make()
    for index in tensors_of(arguments):
        changed = list(arguments)
        changed[index] = torch._efficientzerotensor(arguments[index].shape)
        refused(call, *changed, match="no memory|without memory")


@each_function
def test_functionalize(make: Callable[[], tuple[Call, list[torch.Tensor]]]) -> None:
    call, arguments = make()
    result = torch.func.functionalize(lambda *tensors: first(call(*tensors)))(*arguments)
    assert torch.equal(result, first(call(*arguments)))


@each_function
def test_forward_mode_of_torch_func(make: Callable[[], tuple[Call, list[torch.Tensor]]]) -> None:
    call, arguments = make()

    def of_first(tensor: torch.Tensor) -> torch.Tensor:
        return first(call(tensor, *arguments[1:])).sum()

    one = arguments[0]
    refused(lambda: torch.func.jvp(of_first, (one,), (one,)), match="no forward-mode derivative")


@each_function
def test_a_transform_around_plain_tensors_changes_nothing(
    make: Callable[[], tuple[Call, list[torch.Tensor]]],
) -> None:
    call, arguments = make()
    expected = first(call(*arguments))

    def inside(number: torch.Tensor) -> torch.Tensor:
        return first(call(*arguments)).sum() * number

    assert torch.equal(torch.func.vmap(inside)(torch.ones(2)), expected.sum().expand(2))


@each_function
def test_forward_mode_tangents(make: Callable[[], tuple[Call, list[torch.Tensor]]]) -> None:
    call, arguments = make()
    expected = first(call(*arguments))
    with forward_ad.dual_level():
        assert torch.equal(first(call(*arguments)), expected)
        for index in tensors_of(arguments):
            changed = list(arguments)
            changed[index] = forward_ad.make_dual(arguments[index], torch.ones_like(arguments[index]))
            refused(call, *changed, match="no forward-mode derivative")


class Elsewhere(torch.Tensor):
    """Holds zeros; its numbers are in another tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Elsewhere:
        made = torch.Tensor._make_subclass(cls, torch.zeros_like(inner))
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [each.inner if isinstance(each, cls) else each for each in args]
        return function(*args, **(kwargs or {}))


class Wrapper(Elsewhere):
    """The same without memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made


class Named(torch.Tensor):
    """A subclass whose memory is its numbers."""


@each_function
@pytest.mark.parametrize("subclass", [Elsewhere, Wrapper])
def test_a_subclass_whose_numbers_are_elsewhere(
    make: Callable[[], tuple[Call, list[torch.Tensor]]], subclass: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    call, arguments = make()
    expected = first(call(*arguments))
    for index in range(len(arguments)):
        changed = list(arguments)
        changed[index] = subclass(arguments[index])
        assert torch.equal(first(call(*changed)), expected)


@each_function
def test_a_subclass_that_is_its_memory(make: Callable[[], tuple[Call, list[torch.Tensor]]]) -> None:
    call, arguments = make()
    expected = first(call(*arguments))
    named = [tensor.as_subclass(Named) for tensor in arguments]
    assert torch.equal(torch.Tensor(first(call(*named))), expected)
    with torch.no_grad():
        parameters = [
            torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()) for tensor in arguments
        ]
        assert torch.equal(first(call(*parameters)), expected)


@each_function
def test_layouts(make: Callable[[], tuple[Call, list[torch.Tensor]]]) -> None:
    call, arguments = make()
    for index in tensors_of(arguments):
        tensor = arguments[index]
        nested = torch.nested.nested_tensor(list(tensor.unbind(0)))
        jagged = torch.nested.nested_tensor(list(tensor.unbind(0)), layout=torch.jagged)
        for strange in (tensor.to_sparse(), tensor.to_mkldnn(), nested, jagged):
            changed = list(arguments)
            changed[index] = strange
            refused(call, *changed, match="dense|is a NestedTensor")


@each_function
def test_fake_tensors(make: Callable[[], tuple[Call, list[torch.Tensor]]]) -> None:
    """What would come out, inside the mode and outside of it."""
    call, arguments = make()
    expected = first(call(*arguments))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in arguments]
        inside = first(call(*fake))
    for result in (inside, first(call(*fake))):
        assert isinstance(result, FakeTensor)
        assert (result.shape, result.dtype, result.stride()) == (
            expected.shape,
            expected.dtype,
            expected.stride(),
        )


@each_function
def test_meta_tensors(make: Callable[[], tuple[Call, list[torch.Tensor]]]) -> None:
    call, arguments = make()
    if len(arguments) > 1:
        refused(call, arguments[0], *(tensor.to("meta") for tensor in arguments[1:]), match="meta")


class Watcher(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function.name())
        return function(*args, **(kwargs or {}))


@each_function
def test_a_mode_sees_one_operator(
    make: Callable[[], tuple[Call, list[torch.Tensor]]],
) -> None:
    call, arguments = make()
    expected = first(call(*arguments))
    with Watcher() as watcher:
        result = first(call(*arguments))
    assert torch.equal(result, expected)
    (seen,) = watcher.seen
    assert seen.startswith("flashmoe_science::")
