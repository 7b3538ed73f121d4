"""Which of a thread's calls a call repeats: by options, bounds, which tensors are given, and what those are like."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from emulated import NEEDS_COMPILER
from steady_machine import NAMES, OPTIONS, Machine, address, attempt, inputs, machine
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from flashmoe_science.cuda.steady import KnownCalls

pytestmark = NEEDS_COMPILER
__all__ = ["machine"]


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


def test_a_bound_may_run_code_that_makes_the_thread_forget_its_calls(machine: Machine) -> None:
    """It is asked once, whatever the number of calls, and before any of them is looked at."""
    thread_calls = KnownCalls(len(NAMES), most=1)
    thread_calls.add(machine.made_like(inputs()))
    call = thread_calls.attempt
    assert call is not None
    asked = []

    class Bound:
        def __index__(self) -> int:
            asked.append(self)
            thread_calls.add(machine.made_like(inputs(sinks=True)))
            gc.collect()
            return 1

    call(*inputs(), *OPTIONS, Bound(), 40)
    assert len(asked) == 1
    assert call(*inputs(sinks=True), *OPTIONS, 1, 40) is not None


def test_calls_of_one_kind_may_have_any_shapes_in_turn(machine: Machine) -> None:
    shapes = [((3, 4), (9, 4)), ((5, 4), (9, 4)), ((3, 4), (8, 4)), ((7, 4), (7, 4))]
    made = [machine.made_like((*map(torch.zeros, each), None, None, None)) for each in shapes]
    words = 2, 4, 5
    for word, call in zip(words, made, strict=False):
        call.fields.output_word = word
    call = attempt(*made[:3])
    for turn in (0, 1, 2, 2, 1, 0, 2, 0, 1):
        given = (*map(torch.zeros, shapes[turn]), None, None, None)
        results = call(given, OPTIONS, 1, 40)
        assert machine.launched[-1][:2] == (address(given[0]), address(given[1]))
        assert machine.launched[-1][words[turn]] == address(results)
    assert len(machine.launched) == 9
    assert call((*map(torch.zeros, shapes[3]), None, None), OPTIONS, 1, 40) is None
    assert call((torch.zeros(()), torch.zeros(9, 4), None, None), OPTIONS, 1, 40) is None


def test_an_error_of_one_call_s_check_leaves_the_next_alone(machine: Machine) -> None:
    one, other = machine.made_like(inputs()), machine.made_like(inputs())

    def fails(*tensors: Any) -> bool:
        raise ValueError

    other.fields.matches = fails
    assert attempt(one, other)(inputs(), OPTIONS, 1, 40) is not None
    assert len(machine.launched) == 1


def test_the_latest_call_is_tried_first(machine: Machine) -> None:
    asked, like = list[str](), {"one": True, "other": True}
    made = {name: machine.made_like(inputs()) for name in like}
    for name, call in made.items():
        call.fields.matches = partial(lambda name, *tensors: (asked.append(name), like[name])[1], name)
    function = attempt(*made.values())
    for unlike, expected in (
        ("", ["other"]),
        ("other", ["other", "one"]),
        ("", ["one"]),
        ("one", ["one", "other"]),
        ("", ["other"]),
    ):
        asked.clear()
        like.update((name, name != unlike) for name in like)
        assert function(inputs(), OPTIONS, 1, 40) is not None
        assert asked == expected


def test_the_oldest_call_is_forgotten_and_one_that_is_known_is_not_known_twice(machine: Machine) -> None:
    kinds = [inputs(), inputs(sinks=True), inputs(out=True)]
    made = [machine.made_like(given) for given in kinds]
    thread_calls = KnownCalls(len(NAMES), most=2)

    def recognised() -> list[bool]:
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
        assert recognised() == expected


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
