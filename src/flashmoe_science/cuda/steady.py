"""Repeated calls as one built-in function (`kernels/host/repeated_call.cpp`), compiled at first use.

It takes what `repeat` knows of calls, and where a launch's addresses go. Where there is no C++ compiler the same is
done in Python: as right, in more than twice the time.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flashmoe_science.alike import Matches, dense_matcher, never
from flashmoe_science.cuda.choice import asked_for
from flashmoe_science.cuda.driver import library
from flashmoe_science.cuda.launch import Launcher
from flashmoe_science.cuda.repeat import Layout, current_device, raw_stream
from flashmoe_science.cuda.tickets import TicketPool
from flashmoe_science.cuda.torch_c import (
    Likeness,
    TensorFunctions,
    current_stream,
    likeness_of,
    tensor_functions,
)
from flashmoe_science.errors import BuildError, DeviceError
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.torch_private import dispatch_modes

OVERRIDE_VARIABLE = "FLASHMOE_REPEATED_CALLS"
_SOURCE = Path(__file__).resolve().parents[1] / "kernels" / "host" / "repeated_call.cpp"
_METHOD = "flashmoe_repeated_call_method"
_MOST_TENSORS = 16
_OPTIONS = 7
_ANY = -1

Attempt = Callable[..., Any]
"""The results of a call, of all inputs, all options, max_seqlen_q and max_seqlen_k, one after another; None, and
nothing was done, for one that is like none that the thread knows, or has to be made another way."""


class _Call(ctypes.Structure):
    """`RepeatedCall` of the source."""

    _fields_ = (
        ("owner", ctypes.c_void_p),
        ("options", ctypes.py_object * _OPTIONS),
        *(
            (name, ctypes.py_object)
            for name in (
                "matches",
                "matches_first",
                "allocate",
                "layout",
                "lse_layout",
                "stream_of",
                "device",
            )
        ),
        *((name, ctypes.py_object) for name in ("current_device", "counters")),
        *(
            (name, ctypes.c_int64)
            for name in ("device_index", "max_seqlen_q", "least_seqlen_k", "most_seqlen_k")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("stream", "argument", "is_capturing", "launch", "config", "function", "arguments")
        ),
        *((name, ctypes.c_int64) for name in ("given", "given_bits", "tokens")),
        *((name, ctypes.c_int64 * _MOST_TENSORS) for name in ("index_given", "word", "unaligned")),
        *((name, ctypes.c_int64) for name in ("output", "output_word", "lse_word")),
        ("likeness", Likeness * _MOST_TENSORS),
    )


class _Known(ctypes.Structure):
    """`KnownCalls` of the source."""

    _fields_ = (
        *(
            (name, ctypes.py_object)
            for name in ("modes", "is_nested", "is_scarce", "data_ptr", "tensor_type")
        ),
        ("of_tensor", TensorFunctions),
        ("current_stream", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("inputs", "count", "latest")),
        ("calls", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Target:
    """Where a launch's addresses go."""

    launcher: Launcher
    """Of this kind of call alone: but for addresses, its argument is that of the last call on `stream`."""
    words: Mapping[str, int]
    """Which word of 8 bytes of the argument has the address of the input of that name; also of "output" and "lse"."""
    alignments: Mapping[str, int]
    """At a multiple of how many bytes an input has to start, where that is not any."""
    counters: TicketPool
    device: int
    bounds: range = range((1 << 31) - 1)
    """Values of `max_seqlen_k` with which the launch is the same."""
    stream: ctypes.c_int64 = field(default_factory=lambda: ctypes.c_int64(_ANY))
    """For which the argument was written."""


@dataclass(frozen=True)
class Kind:
    """What calls have in common that are made alike."""

    inputs: Sequence[str]
    """Names of all, in order."""
    given: Sequence[str]
    """Of those that are not None, in an order of their own."""
    tensors: Sequence[torch.Tensor]
    """Those of one such call. None requires a gradient."""
    options: tuple[object, ...]
    """The first is causal and the sixth return_lse, of which Python's own values are taken and nothing else."""
    allocate: Callable[..., torch.Tensor]
    output: Layout
    """As long as the first input."""
    lse: Layout | None
    max_seqlen_q: int


@dataclass(frozen=True)
class RepeatedCall:
    """What makes calls of a kind. It belongs to the thread that owns the launcher."""

    fields: _Call
    address: int
    """Of the fields."""
    target: Target
    """Kept, as the fields point into it."""


class _Like(NamedTuple):
    """How tensors are compared with those of an earlier call."""

    each: list[Likeness | None]
    """None for one of which C is not asked."""
    matches: Matches
    """Of those that may require a gradient, or of which C is not asked."""
    matches_first: Matches | None
    """Of the first alone, for what the thread is set to: where C is asked of all."""


def _like(tensors: Sequence[torch.Tensor]) -> _Like | None:
    functions = tensor_functions()
    each = [None if functions is None else likeness_of(functions, tensor) for tensor in tensors]
    guarded = [
        tensor
        for tensor, likeness in zip(tensors, each, strict=True)
        if likeness is None or not likeness.is_integer
    ]
    matches = dense_matcher(*guarded, under_no_grad=True)
    if matches is never:
        return None
    alone = None not in each and guarded[0] is tensors[0]
    return _Like(each, matches, dense_matcher(tensors[0], under_no_grad=True) if alone else None)


def repeated_call(kind: Kind, target: Target) -> RepeatedCall | None:
    """None where there is no function that could make it."""
    if _method() is None or len(kind.inputs) > _MOST_TENSORS:
        return None
    like = _like(kind.tensors)
    if like is None:
        return None
    launcher, index = target.launcher, {name: position for position, name in enumerate(kind.inputs)}
    several = torch.cuda.is_available() and torch.cuda.device_count() > 1
    fields = _Call(
        options=kind.options,
        matches=like.matches,
        allocate=kind.allocate,
        layout=tuple(kind.output),
        stream_of=raw_stream,
        device=target.device,
        is_capturing=_address(library().cuStreamIsCapturing),
        counters=target.counters,
        device_index=target.device,
        max_seqlen_q=kind.max_seqlen_q,
        least_seqlen_k=target.bounds.start,
        most_seqlen_k=target.bounds.stop - 1,
        stream=ctypes.addressof(target.stream),
        argument=ctypes.addressof(launcher.buffer),
        launch=_address(launcher.entry),
        config=ctypes.addressof(launcher.config),
        function=launcher.function.value,
        arguments=ctypes.addressof(launcher.arguments),
        given=len(kind.given),
        given_bits=sum(1 << index[name] for name in kind.given),
        tokens=kind.output.sizes[0],
        output=kind.given.index("out") if "out" in kind.given else -1,
        output_word=target.words["output"],
        lse_word=target.words["lse"],
    )
    if like.matches_first is not None:
        fields.matches_first = like.matches_first
    if kind.lse is not None:
        fields.lse_layout = tuple(kind.lse)
    if several:
        fields.current_device = current_device
    for position, (name, likeness) in enumerate(zip(kind.given, like.each, strict=True)):
        fields.likeness[position] = likeness or Likeness(dim=_ANY)
        fields.index_given[position] = index[name]
        fields.word[position] = target.words[name]
        fields.unaligned[position] = target.alignments.get(name, 1) - 1
    call = RepeatedCall(fields, ctypes.addressof(fields), target)
    fields.owner = id(call)  # a reference would be a cycle
    return call


class KnownCalls:
    """The repeated calls of a thread."""

    def __init__(self, inputs: int, most: int = 128) -> None:
        """
        Args:
            inputs: how many a call has, those that are None included.
            most: how many calls are known. With one more the oldest is forgotten.
        """
        self.attempt: Attempt | None = None
        """Makes those that are known; None where there never were any."""
        self._inputs, self._most = inputs, most
        self._fields: _Known | None = None
        self._slots: dict[int, int] = {}
        """Where in the table a call is, by its address."""
        self._next = 0
        self._calls: list[RepeatedCall] = []
        self._table = (ctypes.c_void_p * most)()

    def add(self, call: RepeatedCall) -> None:
        """Know this one, too, and try it first."""
        if self._fields is None:
            self._fields, self.attempt = _attempt(self._inputs, self._table, self._calls)
        slot = self._slots.get(call.address)
        if slot is None:
            slot = self._slot_for(call)
            self._fields.count = len(self._calls)
        self._fields.latest = slot

    def _slot_for(self, call: RepeatedCall) -> int:
        slot, self._next = self._next, (self._next + 1) % self._most
        self._table[slot] = call.address
        if slot == len(self._calls):
            self._calls.append(call)
        else:
            del self._slots[self._calls[slot].address]
            self._calls[slot] = call
        self._slots[call.address] = slot
        return slot


def _attempt(inputs: int, table: Any, calls: list[RepeatedCall]) -> tuple[_Known, Attempt]:
    """A function that makes the calls of a table: as many as its fields say, of which there is none yet."""
    fields = _Known(
        modes=dispatch_modes,
        is_nested="is_nested",
        is_scarce="is_scarce",
        data_ptr=torch.Tensor.data_ptr,
        tensor_type=torch.Tensor,
        current_stream=current_stream(),
        inputs=inputs,
        calls=ctypes.addressof(table),
    )
    if (functions := tensor_functions()) is not None:
        fields.of_tensor = functions
    of_python = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    new_function = of_python(("PyCFunction_NewEx", ctypes.pythonapi))
    # The tuple is the function's `self`, and keeps alive what the fields point to.
    function: Attempt = new_function(_method(), (ctypes.addressof(fields), fields, table, calls), None)
    return fields, function


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


@functools.cache
def _method() -> int | None:
    """The address of the source's PyMethodDef; None where it cannot be compiled, or is not wanted."""
    if asked_for(OVERRIDE_VARIABLE, ("native", "python"), "native") == "python":
        return None
    try:
        loaded = host.load(host.build(_SOURCE, "repeated_call", InstructionSet.PORTABLE))
    except (BuildError, DeviceError):
        return None
    _keep.append(loaded)
    return ctypes.addressof(ctypes.c_char.in_dll(loaded, _METHOD))


_keep: list[ctypes.CDLL] = []
"""The library stays loaded as long as functions of it are."""
