"""Calls whose tensors' memory does not hold their numbers, or that are recorded: right, or refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_reference import make_moe
from torch._subclasses import FakeTensorMode
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
    refused(
        lambda: torch.jit.trace(lambda *tensors: first(call(*tensors)), tuple(arguments)),
        match=r"torch\.jit\.trace cannot record",
    )


@each_function
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(make: Callable[[], tuple[Call, list[torch.Tensor]]], mode: str) -> None:
    call, arguments = make()
    refused(
        lambda: make_fx(lambda *tensors: first(call(*tensors)), tracing_mode=mode)(*arguments),
        match="cannot record|no memory",
    )


@each_function
def test_a_negative_bit(make: Callable[[], tuple[Call, list[torch.Tensor]]]) -> None:
    call, arguments = make()
    for index in tensors_of(arguments):
        changed = list(arguments)
        changed[index] = torch._neg_view(arguments[index])
        refused(call, *changed, match="negative or conjugate bit")
        changed[index] = torch.view_as_complex(
            torch.stack([arguments[index], arguments[index]], dim=-1)
        ).conj()
        refused(call, *changed, match="negative or conjugate bit|dtype")


@each_function
def test_a_zero_tensor(make: Callable[[], tuple[Call, list[torch.Tensor]]]) -> None:
    call, arguments = make()
    for index in tensors_of(arguments):
        changed = list(arguments)
        changed[index] = torch._efficientzerotensor(arguments[index].shape)
        refused(call, *changed, match="no memory|without memory")


@each_function
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "vjp", "functionalize", "jacrev"])
def test_transforms_of_torch_func(
    make: Callable[[], tuple[Call, list[torch.Tensor]]], transform: str
) -> None:
    call, arguments = make()

    def of_first(tensor: torch.Tensor) -> torch.Tensor:
        return first(call(tensor, *arguments[1:])).sum()

    one = arguments[0]
    calls: dict[str, Callable[[], Any]] = {
        "vmap": lambda: torch.func.vmap(of_first)(torch.stack([one, one])),
        "grad": lambda: torch.func.grad(of_first)(one),
        "jvp": lambda: torch.func.jvp(of_first, (one,), (one,)),
        "vjp": lambda: torch.func.vjp(of_first, one),
        "functionalize": lambda: torch.func.functionalize(of_first)(one),
        "jacrev": lambda: torch.func.jacrev(of_first)(one),
    }
    refused(calls[transform], match=r"torch\.func|requires a gradient|tangent")


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
            refused(call, *changed, match="forward-mode tangent")


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
    for index in range(len(arguments)):
        changed = list(arguments)
        changed[index] = subclass(arguments[index])
        refused(call, *changed, match=f"is a {subclass.__name__}")  # type: ignore[attr-defined]


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
def test_fake_and_meta_tensors(make: Callable[[], tuple[Call, list[torch.Tensor]]]) -> None:
    call, arguments = make()
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in arguments]
        refused(call, *fake, match="no memory")
    refused(call, *fake, match="no memory")
    if len(arguments) > 1:
        refused(call, arguments[0], *(tensor.to("meta") for tensor in arguments[1:]), match="meta")


class Counter(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@each_function
def test_a_mode_that_only_watches_changes_nothing(
    make: Callable[[], tuple[Call, list[torch.Tensor]]],
) -> None:
    call, arguments = make()
    expected = first(call(*arguments))
    with Counter():
        assert torch.equal(first(call(*arguments)), expected)


@each_function
def test_compiled_callers_get_the_same(make: Callable[[], tuple[Call, list[torch.Tensor]]]) -> None:
    call, arguments = make()

    def model(*tensors: torch.Tensor) -> torch.Tensor:
        return first(call(*tensors)) + 1

    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(*arguments), model(*arguments))
