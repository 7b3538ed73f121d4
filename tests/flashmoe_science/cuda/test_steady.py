"""Repeated calls as one function: where addresses go, and what is left to Python."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import NEEDS_COMPILER
from steady_machine import NAMES, OPTIONS, STREAM, WORDS, Machine, address, attempt, inputs, machine

from flashmoe_science.cuda import steady
from flashmoe_science.cuda.repeat import Layout
from flashmoe_science.cuda.steady import Kind, Target, repeated_call
from flashmoe_science.cuda.torch_c import TensorFunctions, tensor_functions
from flashmoe_science.errors import InputError

pytestmark = NEEDS_COMPILER
__all__ = ["machine"]
STATUS = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
OF_STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))


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


class Subclass(torch.Tensor):
    pass


OTHERS: dict[str, Callable[[list[Any]], None]] = {
    "another shape": lambda given: given[0].__setitem__(1, torch.zeros(10, 4)),
    "another dtype": lambda given: given[0].__setitem__(0, torch.zeros(3, 4).half()),
    "sinks": lambda given: given[0].__setitem__(2, torch.zeros(4)),
    "a result": lambda given: given[0].__setitem__(3, torch.zeros(3, 4)),
    "no key": lambda given: given[0].__setitem__(1, None),
    "no tensor": lambda given: given[0].__setitem__(1, "key"),
    "another key": lambda given: given[0].__setitem__(1, torch.zeros(9, 4).half()),
    "a key apart": lambda given: given[0].__setitem__(1, torch.zeros(9, 8)[:, ::2]),
    "a key of a subclass": lambda given: given[0].__setitem__(1, torch.zeros(9, 4).as_subclass(Subclass)),
    "a nested key": lambda given: given[0].__setitem__(
        1, torch.nested.nested_tensor([torch.zeros(4)] * 9, layout=torch.strided)
    ),
    "a key elsewhere": lambda given: given[0].__setitem__(1, torch.zeros(9, 4, device="meta")),
    "a key without memory": lambda given: given[0].__setitem__(1, torch._efficientzerotensor(9, 4)),
    "a negative key": lambda given: given[0].__setitem__(1, torch._neg_view(torch.zeros(9, 4))),
    "a negative query": lambda given: given[0].__setitem__(0, torch._neg_view(torch.zeros(3, 4))),
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
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("other", OTHERS)
def test_another_call_is_left_to_python(machine: Machine, other: str, recorded: bool) -> None:
    call = machine.call_like(inputs())
    given: list[Any] = [list(inputs()), OPTIONS, 1, 40]
    OTHERS[other](given)
    with torch.set_grad_enabled(recorded):
        assert call(tuple(given[0]), *given[1:]) is None
        assert machine.launched == []
        assert call(inputs(), OPTIONS, 1, 41) is not None


def test_a_key_that_would_be_recorded_is_left_to_python_where_something_is(machine: Machine) -> None:
    call, given = machine.call_like(inputs()), list(inputs())
    given[1] = torch.zeros(9, 4, requires_grad=True)
    assert call(tuple(given), OPTIONS, 1, 40) is None
    assert machine.launched == []
    with torch.no_grad():
        assert call(tuple(given), OPTIONS, 1, 40) is not None


FIELDS = ("dim", "sizes", "strides", "keys", "dtype", "device_type", "device_index")


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_of_what_a_tensor_is_like_is_compared(machine: Machine, field: str) -> None:
    """Devices among them, of which there is one here."""
    given = inputs(lengths=True)
    for position in (1, 2):  # the key, and the lengths
        made = machine.made_like(given)
        likeness = made.fields.likeness[position]
        if field in ("sizes", "strides"):
            getattr(likeness, field)[0] += 1
        else:
            setattr(likeness, field, getattr(likeness, field) + 1)
        with torch.no_grad():
            assert attempt(made)(given, OPTIONS, 1, 40) is None
    assert machine.launched == []


@pytest.mark.parametrize("name", ["dim", "sizes", "strides", "dtype", "device_type", "device_index"])
def test_a_status_of_one_function_leaves_the_call_to_python(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    theirs = tensor_functions()
    assert theirs is not None
    right = STATUS(getattr(theirs, name))
    refuse = STATUS(lambda tensor, answer: right(tensor, answer) + 1)  # whatever it says, its status counts
    ours = TensorFunctions.from_buffer_copy(theirs)
    setattr(ours, name, ctypes.cast(refuse, ctypes.c_void_p).value)
    made = machine.made_like(inputs())
    monkeypatch.setattr(steady, "tensor_functions", lambda: ours)
    call = attempt(made)
    with torch.no_grad():
        assert call(inputs(), OPTIONS, 1, 40) is None
    assert machine.launched == []


def test_integers_alone_and_no_functions_of_c_do_no_harm(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(9, 4), None, None, None
    made = machine.made_like(numbers)
    with torch.no_grad():
        assert attempt(made)(numbers, OPTIONS, 1, 40) is not None
    monkeypatch.setattr(steady, "tensor_functions", lambda: None)
    call = attempt(made)  # of a thread that has none, though the call was made with them
    with torch.no_grad():
        assert call(numbers, OPTIONS, 1, 40) is None


def test_one_tensor_given_twice(machine: Machine) -> None:
    """PyTorch's check refuses it; it is no other call than with two."""
    call, one = machine.call_like((torch.zeros(3, 4), torch.zeros(3, 4), None, None, None)), torch.zeros(3, 4)
    assert call((one, one, None, None, None), OPTIONS, 1, 40) is None
    with torch.no_grad():
        assert call((one, one, None, None, None), OPTIONS, 1, 40) is not None
    assert machine.launched[-1][:2] == (address(one), address(one))


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_another_state_of_the_thread_is_another_call(machine: Machine, autocast: torch.dtype) -> None:
    call = machine.call_like(inputs())
    with torch.no_grad(), torch.autocast("cpu", autocast):
        assert call(inputs(), OPTIONS, 1, 40) is None
        within = machine.call_like(inputs())
        assert within(inputs(), OPTIONS, 1, 40) is not None
    with torch.no_grad():
        assert within(inputs(), OPTIONS, 1, 40) is None
        results = torch.func.vmap(lambda query: call((query, *inputs()[1:]), OPTIONS, 1, 40) or query)(
            torch.zeros(2, 3, 4)
        )
    assert results.shape == (2, 3, 4)
    assert len(machine.launched) == 1


UNLIKE_LENGTHS: dict[str, Callable[[], Any]] = {
    "more": lambda: torch.zeros(4, dtype=torch.int32),
    "wider": lambda: torch.zeros(3, dtype=torch.int64),
    "two dimensions": lambda: torch.zeros(3, 1, dtype=torch.int32),
    "a scalar": lambda: torch.zeros((), dtype=torch.int32),
    "apart": lambda: torch.zeros(6, dtype=torch.int32)[::2],
    "no numbers": lambda: torch.zeros(3),
    "elsewhere": lambda: torch.zeros(3, dtype=torch.int32, device="meta"),
    "a subclass": lambda: torch.zeros(3, dtype=torch.int32).as_subclass(Subclass),
    "a parameter": lambda: torch.nn.Parameter(torch.zeros(3, dtype=torch.int32), False),
    "zeros without memory": lambda: torch._efficientzerotensor(3, dtype=torch.int32),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(1, dtype=torch.int32)] * 3),
    "sparse": lambda: torch.zeros(3, dtype=torch.int32).to_sparse(),
    "a list": lambda: [0, 0, 0],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("unlike", UNLIKE_LENGTHS)
def test_lengths_of_another_kind_are_left_to_python(machine: Machine, unlike: str, recorded: bool) -> None:
    call, given = machine.call_like(inputs(lengths=True)), inputs(lengths=True)
    with torch.set_grad_enabled(recorded):
        assert call((*given[:4], UNLIKE_LENGTHS[unlike]()), OPTIONS, 1, 40) is None
        assert machine.launched == []
        assert call(given, OPTIONS, 1, 40) is not None
    assert machine.launched[-1][5] == address(given[4])


def test_lengths_that_cannot_be_read_go_the_longer_way(machine: Machine) -> None:
    call, given = machine.call_like(inputs(lengths=True)), inputs(lengths=True)
    torch._C._set_throw_on_mutable_data_ptr(given[4])  # type: ignore[attr-defined]
    assert call(given, OPTIONS, 1, 40) is None
    assert machine.launched == []


class AskedOfC:
    """In the place of PyTorch's function for addresses: which tensors it was asked of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        theirs = tensor_functions()
        assert theirs is not None
        self.tensors: list[int] = []
        self._word, self._theirs = theirs.word, STATUS(theirs.data_ptr)
        self._entry = STATUS(self._answer)
        ours = TensorFunctions.from_buffer_copy(theirs)
        ours.data_ptr = ctypes.cast(self._entry, ctypes.c_void_p).value
        monkeypatch.setattr(steady, "tensor_functions", lambda: ours)

    def _answer(self, tensor: int, address: int) -> int:
        self.tensors.append(tensor)
        return int(self._theirs(tensor, address))

    def in_c(self, tensor: torch.Tensor) -> int:
        return id(tensor) + 8 * self._word


def test_only_of_plain_tensors_is_the_address_asked_in_c(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = AskedOfC(monkeypatch)
    given = (
        torch.nn.Parameter(torch.zeros(3, 4), False),
        torch.zeros(9, 4).as_subclass(Subclass),
        torch.zeros(3),
        None,
        None,
    )
    call = machine.call_like(given)
    asked.tensors.clear()
    results = call(given, OPTIONS, 1, 40)
    sinks = address(given[2])
    assert machine.launched == [(address(given[0]), address(given[1]), address(results), 0, sinks, 0)]
    assert asked.tensors == [asked.in_c(given[2]), asked.in_c(results)]


def test_a_tensor_whose_memory_may_not_be_read_goes_the_longer_way(machine: Machine) -> None:
    """Which says why not, as PyTorch does of what a later replay has overwritten."""
    call = machine.call_like(inputs())
    given = inputs()
    torch._C._set_throw_on_mutable_data_ptr(given[0])  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError):
        given[0].data_ptr()
    assert call(given, OPTIONS, 1, 40) is None
    assert machine.launched == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_without_functions_of_c_tensors_are_asked_by_their_attributes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady, "tensor_functions", lambda: None)
    call = machine.call_like(inputs(sinks=True, lengths=True))
    given = inputs(sinks=True, lengths=True)
    nested = torch.nested.nested_tensor([torch.zeros(4)] * 3, layout=torch.strided)
    assert call((nested, *given[1:]), OPTIONS, 1, 40) is None
    assert call(("query", *given[1:]), OPTIONS, 1, 40) is None
    results = call(given, OPTIONS, 1, 40)
    expected = (*map(address, (given[0], given[1], results)), 0, *map(address, (given[2], given[4])))
    assert machine.launched == [expected]
    assert call((*given[:4], torch.zeros(4, dtype=torch.int32)), OPTIONS, 1, 40) is None


def test_the_stream_is_asked_in_c_where_pytorch_has_such_a_function(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, devices = [0], list[int]()

    def answer(device: int, stream: Any) -> int:
        devices.append(device)
        stream[0] = STREAM
        return status[0]

    entry = OF_STREAM(answer)
    monkeypatch.setattr(steady, "current_stream", lambda: ctypes.cast(entry, ctypes.c_void_p).value)
    monkeypatch.setattr(steady, "raw_stream", lambda device: STREAM + 1)
    made = machine.made_like(inputs())
    made.fields.device_index = 3
    call = attempt(made)
    assert call(inputs(), OPTIONS, 1, 40) is not None
    assert devices == [3]
    status[0] = 1
    assert call(inputs(), OPTIONS, 1, 40) is None, "by Python it is another"


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
    layout = Layout((3, 4), (4, 1), torch.float32)
    call = repeated_call(Kind(NAMES, NAMES[:2], given[:2], OPTIONS, full, layout, None, 1), target)  # type: ignore[arg-type]
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
        call((*given[:2], None, None, None), options, 1, 40)
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
