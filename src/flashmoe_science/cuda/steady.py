"""Repeated calls as one built-in function (`kernels/host/repeated_call.cpp`), compiled at first use.

It takes what `repeat` knows of a call, and where a launch's addresses go. Where there is no C++ compiler the same is
done in Python: as right, in more than twice the time.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashmoe_science.alike import Matches
from flashmoe_science.cuda.choice import asked_for
from flashmoe_science.cuda.driver import library
from flashmoe_science.cuda.launch import Launcher
from flashmoe_science.cuda.repeat import Layout, current_device, raw_stream
from flashmoe_science.cuda.tickets import TicketPool
from flashmoe_science.errors import BuildError, DeviceError
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet

OVERRIDE_VARIABLE = "FLASHMOE_REPEATED_CALLS"
_SOURCE = Path(__file__).resolve().parents[1] / "kernels" / "host" / "repeated_call.cpp"
_METHOD = "flashmoe_repeated_call_method"
_MOST_TENSORS = 16
_ANY = -1
_CHOICES = ("native", "python")
_DEFAULT = "native"

RepeatedCall = Callable[[tuple[Any, ...], tuple[object, ...], int, int], Any]
"""The results of a call, of all inputs, all options, max_seqlen_q and max_seqlen_k; None, and nothing was done, for one
that is not like the one before, or has to be made another way."""


class Fields(ctypes.Structure):
    """`RepeatedCall` of the source."""

    _fields_ = (
        *(
            (name, ctypes.py_object)
            for name in ("is_nested", "is_scarce", "data_ptr", "causal", "return_lse")
        ),
        *(
            (name, ctypes.py_object)
            for name in ("matches", "allocate", "layout", "lse_layout", "stream_of", "device")
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
        ("given", ctypes.c_int64),
        ("absent", ctypes.c_int64),
        *(
            (name, ctypes.c_int64 * _MOST_TENSORS)
            for name in ("index_given", "index_absent", "word", "unaligned")
        ),
        *((name, ctypes.c_int64) for name in ("output", "output_word", "lse_word")),
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
    """Of those that are not None, in the order of `matches`."""
    options: tuple[object, ...]
    """The first is causal and the sixth return_lse, of which Python's own values are taken and nothing else."""
    matches: Matches
    """Of tensors that are given, none of which is nested."""
    allocate: Callable[..., torch.Tensor]
    output: Layout
    lse: Layout | None
    max_seqlen_q: int


def repeated_call(kind: Kind, target: Target) -> RepeatedCall | None:
    """The function that makes such calls; None where there is none. It is for the thread that owns the launcher."""
    method = _method()
    if method is None or len(kind.inputs) > _MOST_TENSORS:
        return None
    launcher, index = target.launcher, {name: position for position, name in enumerate(kind.inputs)}
    absent = [name for name in kind.inputs if name not in kind.given]
    several = torch.cuda.is_available() and torch.cuda.device_count() > 1
    fields = Fields(
        is_nested="is_nested",
        data_ptr=torch.Tensor.data_ptr,
        is_scarce="is_scarce",
        causal=kind.options[0],
        return_lse=kind.options[5],
        matches=kind.matches,
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
        absent=len(absent),
        output=kind.given.index("out") if "out" in kind.given else -1,
        output_word=target.words["output"],
        lse_word=target.words["lse"],
    )
    if kind.lse is not None:
        fields.lse_layout = tuple(kind.lse)
    if several:
        fields.current_device = current_device
    for position, name in enumerate(kind.given):
        fields.index_given[position] = index[name]
        fields.word[position] = target.words[name]
        fields.unaligned[position] = target.alignments.get(name, 1) - 1
    for position, name in enumerate(absent):
        fields.index_absent[position] = index[name]
    new_function = ctypes.pythonapi.PyCFunction_NewEx
    new_function.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    new_function.restype = ctypes.py_object
    # The tuple is the function's `self`, and keeps alive what the fields point to.
    function: RepeatedCall = new_function(method, (ctypes.addressof(fields), fields, target), None)
    return function


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


@functools.cache
def _method() -> int | None:
    """The address of the source's PyMethodDef; None where it cannot be compiled, or is not wanted."""
    if asked_for(OVERRIDE_VARIABLE, _CHOICES, _DEFAULT) == "python":
        return None
    try:
        loaded = host.load(host.build(_SOURCE, "repeated_call", InstructionSet.PORTABLE))
    except (BuildError, DeviceError):
        return None
    _keep.append(loaded)
    return ctypes.addressof(ctypes.c_char.in_dll(loaded, _METHOD))


_keep: list[ctypes.CDLL] = []
"""The library stays loaded as long as functions of it are."""
