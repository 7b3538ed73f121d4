"""A GPU's place for tests of repeated calls as one function: `cuda.steady`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_science.alike import dense_matcher, never
from flashmoe_science.cuda import launch as launching
from flashmoe_science.cuda import steady
from flashmoe_science.cuda.launch import Launcher
from flashmoe_science.cuda.repeat import Layout
from flashmoe_science.cuda.steady import Kind, KnownCalls, RepeatedCall, Target, repeated_call

NAMES = ("query", "key", "sinks", "out", "lengths")
WORDS = {"query": 0, "key": 1, "output": 2, "out": 2, "lse": 3, "sinks": 4, "lengths": 5}
OPTIONS = (True, (-1, -1), 0.0, None, None, False, 0)
STREAM = 77
DRIVER = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 4)
Attempt = Callable[..., Any]
CAPTURES = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))


class Machine:
    """In the place of a GPU: its driver keeps what is launched, and its current stream is what is said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[tuple[int, ...]] = []
        self.status, self.stream, self.capturing = 0, STREAM, False
        self.counters: Any = SimpleNamespace(is_scarce=False)
        self.entry = DRIVER(self._launch)
        self.asked = CAPTURES(self._is_capturing)
        driver = SimpleNamespace(cuLaunchKernelEx=self.entry, cuStreamIsCapturing=self.asked)
        for module in (launching, steady):
            monkeypatch.setattr(module, "library", lambda: driver)
        monkeypatch.setattr(steady, "raw_stream", lambda device: self.stream)
        monkeypatch.setattr(steady, "current_stream", lambda: None)
        monkeypatch.setenv(steady.OVERRIDE_VARIABLE, "native")
        steady._method.cache_clear()
        kernel: Any = SimpleNamespace(threads_per_block=32, dynamic_shared_bytes=0)
        self.launcher = Launcher(ctypes.c_void_p(5), (1, 1, 1), kernel, 48)

    def _launch(self, config: int, function: int, arguments: int, extra: int | None) -> int:
        assert function == 5
        assert extra is None
        buffer = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0]
        assert buffer is not None
        self.launched.append(tuple((ctypes.c_uint64 * 6).from_address(buffer)))
        return self.status

    def _is_capturing(self, stream: int | None, status: Any) -> int:
        assert stream == self.stream
        status[0] = int(self.capturing)
        return self.status

    def call_like(
        self,
        inputs: tuple[torch.Tensor | None, ...],
        *,
        lse: bool = False,
        alignment: int = 16,
        stream: int = STREAM,
    ) -> Attempt:
        return attempt(self.made_like(inputs, lse=lse, alignment=alignment, stream=stream))

    def made_like(
        self,
        inputs: tuple[torch.Tensor | None, ...],
        *,
        lse: bool = False,
        alignment: int = 16,
        stream: int = STREAM,
        options: tuple[Any, ...] = OPTIONS,
        bounds: range = range((1 << 31) - 1),
    ) -> RepeatedCall:
        given = [name for name, tensor in zip(NAMES, inputs, strict=True) if tensor is not None]
        tensors = [tensor for tensor in inputs if tensor is not None]
        if dense_matcher(*tensors) is never:
            pytest.skip("this torch has no TensorGuards, or others than ours")
        target = Target(self.launcher.twin(), WORDS, {"query": alignment}, self.counters, 0, bounds)
        target.stream.value = stream
        kind = Kind(
            NAMES,
            given,
            tensors,
            (*options[:5], lse, *options[6:]),
            lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype),
            Layout((len(tensors[0]), 4), (4, 1), torch.float32),
            Layout((3,), (1,), torch.float32) if lse else None,
            1,
        )
        made = repeated_call(kind, target)
        assert made is not None
        return made


def attempt(*calls: RepeatedCall) -> Attempt:
    """Of all inputs and all options, each as a tuple, and of both bounds."""
    thread_calls = KnownCalls(len(NAMES))
    for call in calls:
        thread_calls.add(call)
    function = thread_calls.attempt
    assert function is not None
    return lambda inputs, options, *bounds: function(*inputs, *options, *bounds)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield Machine(monkeypatch)
    steady._method.cache_clear()


def inputs(
    *, sinks: bool = False, out: bool = False, lengths: bool = False
) -> tuple[torch.Tensor | None, ...]:
    return (
        torch.zeros(3, 4),
        torch.zeros(9, 4),
        torch.zeros(4) if sinks else None,
        torch.zeros(3, 4) if out else None,
        torch.zeros(3, dtype=torch.int32) if lengths else None,
    )


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
