"""Queries and keys rotated by their positions: one kernel in place of the library's ten, on GPUs.

A layer of attention calls a function of its module's file, `apply_rotary_pos_emb`, by name. A layer that was taken runs
its class's own code, in which that name is ours; its class, the file and all other layers stay as they are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import CellType, FunctionType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flashmoe_science.cuda import rotation as cuda
from flashmoe_science.direct import all_direct
from flashmoe_science.huggingface.instances import is_hooked, replace_forward, restore_forward
from flashmoe_science.huggingface.registration import uses
from flashmoe_science.operators.rotation import ROTATE
from flashmoe_science.takeover.availability import REFUSALS, failed
from flashmoe_science.takeover.conditions import why_not_plain
from flashmoe_science.takeover.counts import Entry, count

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_NAME = "apply_rotary_pos_emb"
_ATTRIBUTE = "_cudadent42_rotation"
_devices = ("cuda",)
"""Where the kernel is. On a CPU the library's own code stays."""
_failures: dict[torch.dtype, str] = {}


@dataclass(frozen=True)
class Rotation:
    """What a layer that was taken keeps."""

    config: Any
    """That of its model; see `registration.uses`."""
    implementation: str


class _Namespace(dict[str, Any]):
    """A module's names, as they are when they are asked for, but for one."""

    def __init__(self, module: dict[str, Any], rotate: Rotate) -> None:
        super().__init__({_NAME: rotate})
        self._module = module

    def __missing__(self, name: str) -> Any:
        return self._module[name]


def rotates(layer: torch.nn.Module) -> bool:
    """Whether its class's own code names the function."""
    code = getattr(inspect.unwrap(type(layer).forward), "__code__", None)
    return code is not None and _NAME in code.co_names


def take(layer: torch.nn.Module, config: Any, implementation: str) -> str | None:
    """Let the kernel rotate queries and keys, where they are on a GPU; None if it does, else why not.

    Args:
        config: of the model that the layer is part of.
    """
    if hasattr(layer, _ATTRIBUTE) and is_hooked(layer, forward):
        return None  # since it was taken, and the hook calls it
    if is_hooked(layer, forward):
        return "a layer that somebody else's hook calls"
    own = _innermost(type(layer).forward)
    if own is None:
        return "a layer of another form"
    rotate = own.__globals__.get(_NAME)
    if not callable(rotate) or not _forms(rotate):
        return "its function rotates otherwise"
    setattr(layer, _ATTRIBUTE, Rotation(config, implementation))
    replace_forward(layer, forward)
    return None


def give_back(layer: torch.nn.Module) -> None:
    """Let its class's own code run again, where it was taken."""
    if hasattr(layer, _ATTRIBUTE) and restore_forward(layer, forward):
        delattr(layer, _ATTRIBUTE)


def forward(self: Any, *inputs: Any, **options: Any) -> Any:
    """In place of a layer's own."""
    taken: Rotation = getattr(self, _ATTRIBUTE)
    own = type(self).forward
    if is_dynamo_compiling() or not uses(taken.config, taken.implementation):
        return own(self, *inputs, **options)
    return _with_the_kernel(own)(self, *inputs, **options)


def _innermost(function: Any) -> FunctionType | None:
    """What decorators were put around, as transformers 5.24 has them that rename arguments; None where one of them does
    not hold what it wraps in its closure.
    """
    while (wrapped := getattr(function, "__wrapped__", None)) is not None:
        if type(function) is not FunctionType or _cell_of_wrapped(function) is None:
            return None
        function = wrapped
    return function if type(function) is FunctionType and function.__closure__ is None else None


def _cell_of_wrapped(decorated: Any) -> int | None:
    cells = decorated.__closure__ or ()
    return next((i for i, cell in enumerate(cells) if cell.cell_contents is decorated.__wrapped__), None)


@functools.cache
def _with_the_kernel(own: FunctionType) -> Callable[..., Any]:
    """The function, in whose code the name of the library's rotation is `_attempt`, with the decorators that it has."""
    wrapped = getattr(own, "__wrapped__", None)
    if wrapped is not None:
        cells, index = list(own.__closure__ or ()), _cell_of_wrapped(own)
        assert index is not None  # `take` has asked
        cells[index] = CellType(_with_the_kernel(wrapped))
        outer = FunctionType(own.__code__, own.__globals__, own.__name__, own.__defaults__, tuple(cells))
        outer.__kwdefaults__ = own.__kwdefaults__
        return outer
    rotate = functools.partial(_attempt, own.__globals__[_NAME])
    namespace = _Namespace(own.__globals__, rotate)
    twin = FunctionType(own.__code__, namespace, own.__name__, own.__defaults__)
    twin.__kwdefaults__ = own.__kwdefaults__
    return twin


def _attempt(
    own: Rotate,
    query: torch.Tensor,
    key: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    *others: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of the library's function."""
    if query.device.type in _devices:
        result = "arguments of another form" if others or options else _rotated(own, query, key, cosine, sine)
        if not isinstance(result, str):
            count(Entry.HUGGING_FACE_ROTATION, None)
            return result
        count(Entry.HUGGING_FACE_ROTATION, result)
    return own(query, key, cosine, sine, *others, **options)


def _rotated(
    own: Rotate, query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | str:
    """The result, or why not. `own`: the library's function."""
    reason = why_not_plain(query, key, cosine) or _why_not(own, query, key, cosine, sine)
    if reason is not None:
        return reason
    if query.dtype in _failures:
        return _failures[query.dtype]
    recorded = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    try:
        if query.is_cuda and not recorded and all_direct(query, key, cosine, sine):
            return cuda.rotate(query, key, cuda.readable(cosine), cuda.readable(sine), False)
        rotated: tuple[torch.Tensor, torch.Tensor] = ROTATE(query, key, cosine, sine)
        return rotated
    except REFUSALS as error:
        return failed(_failures, query.dtype, error)


def _why_not(
    own: Rotate, query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
) -> str | None:
    if query.dim() != 4 or key.dim() != 4 or cosine.dim() != 3 or sine.shape != cosine.shape:
        return "arguments of another form"
    batch, _, tokens, head_dim = query.shape
    if key.shape[0] != batch or key.shape[2:] != query.shape[2:]:
        return "arguments of another form"
    if cosine.shape[0] not in (1, batch) or cosine.shape[1] != tokens:
        return "arguments of another form"
    if not any(form.columns(head_dim) == cosine.shape[2] for form in _forms(own)):
        return "a part of each head"
    if not query.device == key.device == cosine.device == sine.device:
        return "more than one device"
    if not query.dtype is key.dtype is cosine.dtype is sine.dtype:
        return "more than one dtype"
    if cosine.requires_grad or sine.requires_grad:
        return "positions that have a gradient"
    return cuda.why_not(query, key)


class _Form(Enum):
    """Of the tables of cosines and sines."""

    EACH_HALF = 1
    """A column for each element of a head."""
    BOTH_HALVES = 2
    """One for two elements, an element of each half. A function that turns the first part of a head, as many elements
    as there are columns, takes such tables for those of half a head: it is no rotation of this form.
    """

    def columns(self, head_dim: int) -> int:
        return head_dim // self.value


@functools.cache
def _forms(rotate: Rotate) -> tuple[_Form, ...]:
    """Of which tables a function computes what `ROTATE` does, by what it makes of a few numbers."""
    return tuple(form for form in _Form if _is_the_rotation(rotate, form))


def _is_the_rotation(rotate: Rotate, form: _Form) -> bool:
    generator = torch.Generator("cpu").manual_seed(0)
    query, key, cosine, sine = (
        torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        for shape in ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, form.columns(8)), (2, 5, form.columns(8)))
    )
    try:
        own = rotate(query, key, cosine, sine)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, NameError):
        return False  # somebody's function of that name, of other arguments
    expected = ROTATE(query, key, cosine, sine)
    return (
        isinstance(own, tuple)
        and len(own) == len(expected)
        and all(
            isinstance(one, torch.Tensor)
            and one.shape == other.shape
            and torch.allclose(one, other, rtol=1e-12, atol=1e-12)
            for one, other in zip(own, expected, strict=True)
        )
    )
