"""Repeated calls as one function: where addresses go, and what is left to Python."""

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
from steady_machine import NAMES, OPTIONS, STREAM, WORDS, Machine, address, attempt, inputs, machine
from torch._subclasses.fake_tensor import FakeTensorMode

from flashmoe_science.alike import dense_matcher
from flashmoe_science.cuda import steady
from flashmoe_science.cuda.repeat import Layout
from flashmoe_science.cuda.steady import Kind, Target, repeated_call
from flashmoe_science.errors import InputError

pytestmark = NEEDS_COMPILER
__all__ = ["machine"]
PYTHON = steady._python


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


class Subclass(torch.Tensor):
    pass


class AddressOf:
    """In the place of PyTorch's function: of which types it was asked, and by what its answers are wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wrong_by: int = 0) -> None:
        self.types: list[type] = []
        self.wrong_by = wrong_by
        self._entry = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(self._answer)
        address = ctypes.cast(self._entry, ctypes.c_void_p).value
        guards = SimpleNamespace(_torchinductor_pyobject_tensor_data_ptr=address)
        monkeypatch.setattr(steady, "private_guards", lambda: guards)

    def _answer(self, tensor: Any) -> int:
        self.types.append(type(tensor))
        return int(tensor.data_ptr()) + self.wrong_by


def test_only_of_plain_results_is_the_address_asked_by_the_shorter_way(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = AddressOf(monkeypatch)
    monkeypatch.setattr(steady, "address_of_tensor", steady.address_of_tensor.__wrapped__)
    given = (
        torch.nn.Parameter(torch.zeros(3, 4), False),
        torch.zeros(9, 4).as_subclass(Subclass),
        torch.zeros(3),
        None,
    )
    call = machine.call_like(given)
    asked.types.clear()
    results = call(given, OPTIONS, 1, 40)
    sinks = address(given[2])
    assert machine.launched == [(address(given[0]), address(given[1]), address(results), 0, sinks, 0)]
    assert asked.types == [torch.Tensor], "the result alone"


def test_a_tensor_whose_memory_may_not_be_read_goes_the_longer_way(machine: Machine) -> None:
    """Which says why not, as PyTorch does of what a later replay has overwritten."""
    call = machine.call_like(inputs())
    given = inputs()
    torch._C._set_throw_on_mutable_data_ptr(given[0])  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError):
        given[0].data_ptr()
    assert call(given, OPTIONS, 1, 40) is None
    assert machine.launched == []


def without_slots(name: str, *types: Any) -> Any:
    assert name != "PyType_GetSlot"
    return PYTHON(name, *types)


@pytest.mark.parametrize("missing", ["address_of_tensor", "PyType_GetSlot", "both"])
def test_without_shorter_ways_tensors_are_asked_by_their_attributes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing != "PyType_GetSlot":
        monkeypatch.setattr(steady, "address_of_tensor", lambda: None)
    if missing != "address_of_tensor":
        monkeypatch.setattr(steady, "GetSetDescriptorType", property)
        monkeypatch.setattr(steady, "_python", without_slots)
    call, given = machine.call_like(inputs(sinks=True)), inputs(sinks=True)
    nested = torch.nested.nested_tensor([torch.zeros(4)] * 3, layout=torch.strided)
    assert call((nested, *given[1:]), OPTIONS, 1, 40) is None
    assert call(("query", *given[1:]), OPTIONS, 1, 40) is None
    results = call(given, OPTIONS, 1, 40)
    expected = (*map(address, (given[0], given[1], results)), 0, address(given[2]), 0)
    assert machine.launched == [expected]


@pytest.mark.parametrize("not_an_address", [None, "an address", 0.5])
def test_an_address_that_is_none_is_not_called(
    monkeypatch: pytest.MonkeyPatch, not_an_address: object
) -> None:
    guards = SimpleNamespace(_torchinductor_pyobject_tensor_data_ptr=not_an_address)
    monkeypatch.setattr(steady, "private_guards", lambda: guards)
    assert steady.address_of_tensor.__wrapped__() is None
    monkeypatch.setattr(steady, "private_guards", lambda: None)
    assert steady.address_of_tensor.__wrapped__() is None


def test_a_function_that_answers_otherwise_than_the_method_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    AddressOf(monkeypatch, wrong_by=4)
    assert steady.address_of_tensor.__wrapped__() is None
    right = AddressOf(monkeypatch)
    assert steady.address_of_tensor.__wrapped__() is not None
    right.types.clear()
    with FakeTensorMode():
        assert steady.address_of_tensor.__wrapped__() is None
    assert right.types == []


def test_this_torch_has_such_a_function() -> None:
    assert steady.address_of_tensor() is not None


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
        attempt(call)(given, OPTIONS, 1, 40)
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
