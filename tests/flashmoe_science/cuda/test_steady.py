"""Repeated calls as one function: what is like the last call, where its addresses go, and what is left to Python."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated import NEEDS_COMPILER

from flashmoe_science.alike import dense_matcher, never
from flashmoe_science.cuda import launch as launching
from flashmoe_science.cuda import steady
from flashmoe_science.cuda.launch import Launcher
from flashmoe_science.cuda.repeat import Layout
from flashmoe_science.cuda.steady import Kind, RepeatedCall, Target, repeated_call
from flashmoe_science.errors import InputError

pytestmark = NEEDS_COMPILER

NAMES = ("query", "key", "sinks", "out")
WORDS = {"query": 0, "key": 1, "output": 2, "out": 2, "lse": 3, "sinks": 4}
OPTIONS = (True, (-1, -1), 0.0, None, None, False, 0)
STREAM = 77
DRIVER = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 4)
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
    ) -> RepeatedCall:
        given = [name for name, tensor in zip(NAMES, inputs, strict=True) if tensor is not None]
        tensors = [tensor for tensor in inputs if tensor is not None]
        matches = dense_matcher(*tensors)
        if matches is never:
            pytest.skip("this torch has no TensorGuards, or others than ours")
        target = Target(self.launcher, WORDS, {"query": alignment}, self.counters, 0)
        target.stream.value = stream
        kind = Kind(
            NAMES,
            given,
            (*OPTIONS[:5], lse, 0),
            matches,
            lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype),
            Layout((3, 4), (4, 1), torch.float32),
            Layout((3,), (1,), torch.float32) if lse else None,
            1,
        )
        made = repeated_call(kind, target)
        assert made is not None
        return made


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield Machine(monkeypatch)
    steady._method.cache_clear()


def inputs(*, sinks: bool = False, out: bool = False) -> tuple[torch.Tensor | None, ...]:
    return (
        torch.zeros(3, 4),
        torch.zeros(9, 4),
        torch.zeros(4) if sinks else None,
        torch.zeros(3, 4) if out else None,
    )


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("lse", [False, True])
def test_addresses_of_what_is_given_and_of_results_are_launched(
    machine: Machine, sinks: bool, out: bool, lse: bool
) -> None:
    call = machine.call_like(inputs(sinks=sinks, out=out), lse=lse)
    for _ in range(2):
        now = inputs(sinks=sinks, out=out)
        results = call(now, (*OPTIONS[:5], lse, 0), 1, 40)
        output, sums = results if lse else (results, None)
        assert output is now[3] or not out
        assert (output.shape, output.dtype) == ((3, 4), torch.float32)
        expected = (*map(address, (now[0], now[1], output, sums, now[2])), 0)
        assert machine.launched[-1] == expected
    assert len(machine.launched) == 2


OTHERS: dict[str, Callable[[list[Any]], None]] = {
    "another shape": lambda given: given[0].__setitem__(1, torch.zeros(10, 4)),
    "another dtype": lambda given: given[0].__setitem__(0, torch.zeros(3, 4).half()),
    "sinks": lambda given: given[0].__setitem__(2, torch.zeros(4)),
    "a result": lambda given: given[0].__setitem__(3, torch.zeros(3, 4)),
    "no key": lambda given: given[0].__setitem__(1, None),
    "no tensor": lambda given: given[0].__setitem__(1, "key"),
    "one twice": lambda given: given[0].__setitem__(1, given[0][0]),
    "a gradient": lambda given: given[0].__setitem__(0, torch.zeros(3, 4, requires_grad=True)),
    "strided and nested": lambda given: given[0].__setitem__(
        0, torch.nested.nested_tensor([torch.zeros(4)] * 3, layout=torch.strided)
    ),
    "jagged": lambda given: given[0].__setitem__(
        0, torch.nested.nested_tensor([torch.zeros(4)] * 3, layout=torch.jagged)
    ),
    "misaligned": lambda given: given[0].__setitem__(0, torch.zeros(13)[1:].view(3, 4)),
    "1 for True": lambda given: given.__setitem__(1, (1, *OPTIONS[1:])),
    "0 for False": lambda given: given.__setitem__(1, (*OPTIONS[:5], 0, 0)),
    "more queries": lambda given: given.__setitem__(2, 2),
    "queries in words": lambda given: given.__setitem__(2, "1"),
    "keys of a half": lambda given: given.__setitem__(3, 0.5),
    "keys below none": lambda given: given.__setitem__(3, -1),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("other", OTHERS)
def test_another_call_is_left_to_python(machine: Machine, other: str) -> None:
    call = machine.call_like(inputs())
    given: list[Any] = [list(inputs()), OPTIONS, 1, 40]
    OTHERS[other](given)
    assert call(tuple(given[0]), *given[1:]) is None
    assert machine.launched == []
    assert call(inputs(), OPTIONS, 1, 41) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda machine: setattr(machine, "stream", 78),
        lambda machine: setattr(machine, "capturing", True),
        lambda machine: setattr(machine, "status", 900),
        lambda machine: setattr(machine.counters, "is_scarce", True),
    ],
)
def test_another_stream_a_capture_and_few_counters_are_left_to_python(
    machine: Machine, change: Callable[[Machine], None]
) -> None:
    call = machine.call_like(inputs())
    change(machine)
    assert call(inputs(), OPTIONS, 1, 40) is None
    assert machine.launched == []


def test_where_there_are_several_devices_the_tensors_one_is_current(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(steady, "current_device", lambda: current[0])
    call = machine.call_like(inputs())
    assert call(inputs(), OPTIONS, 1, 40) is not None
    current[0] = 1
    assert call(inputs(), OPTIONS, 1, 40) is None
    assert len(machine.launched) == 1


def test_the_default_stream_is_not_asked_whether_it_is_captured(machine: Machine) -> None:
    call, machine.stream, machine.capturing = machine.call_like(inputs(), stream=0), 0, True
    assert call(inputs(), OPTIONS, 1, 40) is not None


def test_a_launch_that_failed_is_left_to_python_which_says_why(machine: Machine) -> None:
    call, machine.status, machine.stream = machine.call_like(inputs(), stream=0, lse=True), 700, 0
    assert call(inputs(), (*OPTIONS[:5], True, 0), 1, 40) is None
    assert len(machine.launched) == 1


def test_an_allocation_that_fails_is_an_error(machine: Machine) -> None:
    def full(*layout: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    given = inputs()
    target = Target(machine.launcher, WORDS, {}, machine.counters, 0)
    target.stream.value = STREAM
    matches = dense_matcher(*given[:2])  # type: ignore[arg-type]
    layout = Layout((3, 4), (4, 1), torch.float32)
    call = repeated_call(Kind(NAMES, NAMES[:2], OPTIONS, matches, full, layout, None, 1), target)
    assert call is not None
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        call(given, OPTIONS, 1, 40)
    assert machine.launched == []


def test_it_keeps_no_tensor_and_loses_no_object(machine: Machine) -> None:
    given = inputs(sinks=True)
    call = machine.call_like(given, lse=True)
    options = (*OPTIONS[:5], True, 0)
    watched: list[Any] = [*given[:3], options, None, True, machine.counters]
    for _ in range(3):
        call(given, options, 1, 40)
        call(given, OPTIONS, 1, 40)
    before = [sys.getrefcount(each) for each in watched]
    for _ in range(50):
        results = call(given, options, 1, 40)
        counts = sys.getrefcount(results), *(sys.getrefcount(each) - 1 for each in results)
        assert counts == (2, 2, 2)
        call(given, OPTIONS, 1, 40)  # another's options
        call((*given[:2], None, None), options, 1, 40)
    after = [sys.getrefcount(each) for each in watched]
    assert max(abs(one - other) for one, other in zip(before, after, strict=True)) < 20
    alive = weakref.ref(given[0])
    del given, watched, results
    gc.collect()
    assert alive() is None


def test_the_function_keeps_alive_what_it_reads(machine: Machine) -> None:
    call = machine.call_like(inputs())
    del machine.launcher
    gc.collect()
    assert call(inputs(), OPTIONS, 1, 40) is not None


def test_python_makes_calls_unless_it_is_asked_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(steady.OVERRIDE_VARIABLE, "python")
    steady._method.cache_clear()
    assert steady._method() is None
    monkeypatch.setenv(steady.OVERRIDE_VARIABLE, "c")
    steady._method.cache_clear()
    with pytest.raises(InputError, match="FLASHMOE_REPEATED_CALLS='c'; expected one of native, python"):
        steady._method()


def test_without_a_compiler_python_makes_calls(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*given: object) -> Any:
        raise steady.DeviceError("no C++ compiler")

    monkeypatch.setattr(steady.host, "build", missing)
    steady._method.cache_clear()
    assert steady._method() is None
