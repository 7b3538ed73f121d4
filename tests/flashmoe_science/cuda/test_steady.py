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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from flashmoe_science.alike import dense_matcher, never
from flashmoe_science.cuda import launch as launching
from flashmoe_science.cuda import steady
from flashmoe_science.cuda.launch import Launcher
from flashmoe_science.cuda.repeat import Layout
from flashmoe_science.cuda.steady import Kind, KnownCalls, RepeatedCall, Target, repeated_call
from flashmoe_science.errors import InputError

pytestmark = NEEDS_COMPILER

NAMES = ("query", "key", "sinks", "out")
WORDS = {"query": 0, "key": 1, "output": 2, "out": 2, "lse": 3, "sinks": 4}
OPTIONS = (True, (-1, -1), 0.0, None, None, False, 0)
STREAM = 77
PYTHON = steady._python
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
        matches = dense_matcher(*tensors)
        if matches is never:
            pytest.skip("this torch has no TensorGuards, or others than ours")
        target = Target(self.launcher.twin(), WORDS, {"query": alignment}, self.counters, 0, bounds)
        target.stream.value = stream
        kind = Kind(
            NAMES,
            given,
            (*options[:5], lse, *options[6:]),
            matches,
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


def test_calls_of_several_kinds_are_known_at_once(machine: Machine) -> None:
    window = (*OPTIONS[:1], (7, 0), *OPTIONS[2:])
    kinds = [
        (inputs(), OPTIONS),
        (inputs(sinks=True), OPTIONS),
        (inputs(), window),
        (inputs(out=True), window),
    ]
    made = [machine.made_like(given, options=options) for given, options in kinds]
    call = attempt(*made[:2])
    for _ in range(2):
        for given, options in kinds:
            results = call(given, options, 1, 40)
            assert (results is not None) == (options is OPTIONS)
    call = attempt(*made)
    for given, options in 2 * kinds + 2 * kinds[::-1] + 2 * kinds[:1]:
        assert call(given, options, 1, 40) is not None
        assert machine.launched[-1][:2] == (address(given[0]), address(given[1]))
        assert machine.launched[-1][4] == address(given[2])
    assert call(inputs(sinks=True), window, 1, 40) is None


def test_calls_of_one_kind_may_have_any_shapes_in_turn(machine: Machine) -> None:
    shapes = [((3, 4), (9, 4)), ((5, 4), (9, 4)), ((3, 4), (8, 4)), ((7, 4), (7, 4))]
    made = [machine.made_like((*map(torch.zeros, each), None, None)) for each in shapes]
    words = 2, 4, 5
    for word, call in zip(words, made, strict=False):
        call.fields.output_word = word
    call = attempt(*made[:3])
    for turn in (0, 1, 2, 2, 1, 0, 2, 0, 1):
        given = (*map(torch.zeros, shapes[turn]), None, None)
        results = call(given, OPTIONS, 1, 40)
        assert machine.launched[-1][:2] == (address(given[0]), address(given[1]))
        assert machine.launched[-1][words[turn]] == address(results)
    assert len(machine.launched) == 9
    assert call((*map(torch.zeros, shapes[3]), None, None), OPTIONS, 1, 40) is None
    assert call((torch.zeros(()), torch.zeros(9, 4), None, None), OPTIONS, 1, 40) is None


def test_the_oldest_call_is_forgotten_and_one_that_is_known_is_not_known_twice(machine: Machine) -> None:
    kinds = [inputs(), inputs(sinks=True), inputs(out=True)]
    made = [machine.made_like(given) for given in kinds]
    thread_calls = KnownCalls(len(NAMES), most=2)

    def known() -> list[bool]:
        assert thread_calls.attempt is not None
        return [thread_calls.attempt(*given, *OPTIONS, 1, 40) is not None for given in kinds]

    for added, expected in (
        ((0, 1, 1, 0, 1), [True, True, False]),
        ((2,), [False, True, True]),
        ((2, 1, 0), [True, False, True]),
        ((2, 1), [True, True, False]),
    ):
        for number in added:
            thread_calls.add(made[number])
        assert known() == expected


def test_bounds_say_which_of_two_calls_it_is(machine: Machine) -> None:
    short = machine.made_like(inputs(), bounds=range(41))
    others = machine.made_like(inputs(), bounds=range(41, 100))
    short.fields.output_word, others.fields.output_word = 2, 5
    call = attempt(short, others)
    for bound, word in ((40, 2), (41, 5), (0, 2), (99, 5)):
        results = call(inputs(), OPTIONS, 1, bound)
        assert machine.launched[-1][word] == address(results)
    assert call(inputs(), OPTIONS, 1, 100) is None


FULL = (True, (-1, 64), 0.5, 0.125, 1024, False, 256)


@pytest.mark.parametrize(
    ("position", "same", "others"),
    [
        (
            1,
            tuple(map(int, ("-1", "64"))),
            [(-1, 65), (-1, 64, 0), (-1,), [-1, 64], (-1.0, 64), None, torch.tensor(1)],
        ),
        (2, float("0.5"), [0.25, torch.tensor(0.5), None, "0.5", float("nan")]),
        (3, float("0.125"), [0.5, torch.tensor(0.125), None]),
        (4, int("1024"), [128, 1024.0, torch.tensor(1024), None]),
        (6, int("256"), [0, 512, 256.0, None]),
    ],
)
def test_an_option_that_is_computed_anew_is_the_same_if_it_is_equal_and_of_its_type(
    machine: Machine, position: int, same: object, others: list[object]
) -> None:
    call = attempt(machine.made_like(inputs(), options=FULL))
    for option in (FULL[position], same):
        options = (*FULL[:position], option, *FULL[position + 1 :])
        assert call(inputs(), options, 1, 40) is not None
    for option in others:
        options = (*FULL[:position], option, *FULL[position + 1 :])
        assert call(inputs(), options, 1, 40) is None
    assert len(machine.launched) == 2


def test_a_mode_that_sees_operators_is_left_to_python(machine: Machine) -> None:
    call = machine.call_like(inputs())
    with FlopCounterMode(display=False):
        assert call(inputs(), OPTIONS, 1, 40) is None
    answers = []
    make_fx(lambda given: answers.append(call(inputs(), OPTIONS, 1, 40)))(torch.zeros(1))
    assert answers == [None]
    assert call(inputs(), OPTIONS, 1, 40) is not None


def test_transforms_and_bits_of_tensors_are_left_to_python(machine: Machine) -> None:
    call, answers = machine.call_like(inputs()), list[object]()

    def called(query: torch.Tensor) -> torch.Tensor:
        answers.append(call((query, *inputs()[1:]), OPTIONS, 1, 40))
        return query

    torch.func.vmap(called)(torch.zeros(2, 3, 4))
    torch.func.grad(lambda query: called(query).sum())(torch.zeros(3, 4))
    called(torch.complex(torch.zeros(3, 4), torch.zeros(3, 4)).conj().imag)  # a negative bit
    with torch.inference_mode():
        called(torch.zeros(3, 4))
    assert answers == [None] * 4
    assert machine.launched == []


def test_a_count_of_arguments_that_is_not_a_calls_is_none(machine: Machine) -> None:
    thread_calls = KnownCalls(len(NAMES))
    thread_calls.add(machine.made_like(inputs()))
    assert thread_calls.attempt is not None
    assert thread_calls.attempt(*inputs(), *OPTIONS, 1) is None
    assert thread_calls.attempt(*inputs(), *OPTIONS, 1, 40, 0) is None
    assert thread_calls.attempt() is None
    assert machine.launched == []


def test_a_call_that_is_forgotten_while_it_is_made_is_kept_until_its_end(machine: Machine) -> None:
    thread_calls, call = KnownCalls(len(NAMES), most=1), machine.made_like(inputs())
    other = machine.made_like(inputs(sinks=True))
    forgotten = weakref.ref(call)

    def allocate(sizes: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        thread_calls.add(other)
        gc.collect()
        assert forgotten() is not None
        return torch.empty_strided(sizes, strides, dtype=dtype)

    call.fields.allocate = allocate
    thread_calls.add(call)
    del call
    assert thread_calls.attempt is not None
    given = inputs()
    results = thread_calls.attempt(*given, *OPTIONS, 1, 40)
    assert machine.launched == [(address(given[0]), address(given[1]), address(results), 0, 0, 0)]
    assert forgotten() is None
    assert thread_calls.attempt(*given, *OPTIONS, 1, 40) is None


def test_an_argument_that_was_written_for_another_stream_meanwhile_is_not_launched(machine: Machine) -> None:
    made = machine.made_like(inputs())

    def allocate(sizes: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        made.target.stream.value = 78  # as a call does that an object makes at its end
        return torch.empty_strided(sizes, strides, dtype=dtype)

    made.fields.allocate = allocate
    assert attempt(made)(inputs(), OPTIONS, 1, 40) is None
    assert machine.launched == []


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


def test_only_of_plain_tensors_is_the_address_asked_by_the_shorter_way(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = AddressOf(monkeypatch)
    monkeypatch.setattr(steady, "address_of_tensor", steady.address_of_tensor.__wrapped__)
    given = (
        torch.nn.Parameter(torch.zeros(3, 4), False),
        torch.zeros(9, 4).as_subclass(Subclass),
        None,
        None,
    )
    call = machine.call_like(given)
    asked.types.clear()
    results = call(given, OPTIONS, 1, 40)
    assert machine.launched == [(address(given[0]), address(given[1]), address(results), 0, 0, 0)]
    assert asked.types == [torch.Tensor], "the result alone"


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
