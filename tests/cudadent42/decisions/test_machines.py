"""Several machines together: what is said, and how often it is right."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.decisions.machines import (
    CONFIDENCE,
    MachineRatio,
    combine,
    deviation,
    interval,
    is_far_off,
    usual_deviation,
)
from cudadent42.model.records import Verdict

F, E, S, U = Verdict.FASTER, Verdict.EQUAL, Verdict.SLOWER, Verdict.UNDECIDED


def ratio(value: float, verdict: Verdict = F, half: float = 0.005, unit: str = "u") -> MachineRatio:
    return MachineRatio(unit, value, value - half, value + half, verdict)


def fleets(machines: int, between: float, seed: int, count: int = 2000) -> float:
    """Share of intervals that hold the truth: machines with 24 blocks of half a percent each."""
    chance = random.Random(f"{machines}/{between}/{seed}")
    truth = math.log(1.03)
    held = 0
    for _ in range(count):
        centres = [
            truth + chance.gauss(0.0, between) + chance.gauss(0.0, 0.005 / math.sqrt(24))
            for _ in range(machines)
        ]
        _, low, high = interval(centres, CONFIDENCE)
        held += low <= truth <= high
    return held / count


@pytest.mark.parametrize("between", [0.0, 0.002, 0.005])
@pytest.mark.parametrize("machines", [4, 8, 16])
def test_ninety_five_of_a_hundred_intervals_hold_the_truth(machines: int, between: float) -> None:
    """With 2,000 fleets, 0.93 and 0.97 are four standard errors away."""
    assert 0.93 <= fleets(machines, between, 1) <= 0.97


@pytest.mark.parametrize("machines", [4, 8, 16])
def test_equal_code_is_seldom_called_faster_or_slower(machines: int) -> None:
    chance = random.Random(machines)
    called = 0
    for _ in range(500):
        results = [
            MachineRatio(str(unit), math.exp(chance.gauss(0.0, 0.002)), 0.99, 1.01, E)
            for unit in range(machines)
        ]
        called += combine(results, margin=0.0).verdict in (F, S)
    assert called / 500 <= 0.08  # 5 % beyond no margin, and three standard errors


def test_one_machine_speaks_for_itself() -> None:
    only = combine([ratio(1.05)], 0.01)
    assert (only.ratio, only.low, only.high, only.verdict) == (1.05, 1.05 - 0.005, 1.05 + 0.005, F)
    assert only.words == "on this device"


def test_two_or_three_have_to_agree() -> None:
    alike = combine([ratio(1.05), ratio(1.07)], 0.01)
    assert (alike.verdict, alike.low, alike.high) == (F, pytest.approx(1.045), pytest.approx(1.075))
    assert alike.words == "on each of 2 devices"
    assert alike.ratio == pytest.approx(math.sqrt(1.05 * 1.07))
    split = combine([ratio(1.05), ratio(1.07), ratio(1.001, E)], 0.01)
    assert split.verdict is U
    assert split.words == "not alike on 3 devices"


def test_from_four_on_one_interval_speaks_for_the_kind() -> None:
    four = combine([ratio(each) for each in (1.05, 1.052, 1.049, 1.051)], 0.01)
    assert four.verdict is F
    assert four.words == "on this kind of device, by 4 of them"
    assert four.low < 1.0505 < four.high
    # Each machine is certain of itself, and yet they say too different things for the kind.
    apart = combine([ratio(each) for each in (1.02, 1.15, 1.03, 1.20)], 0.01)
    assert apart.verdict is U
    same = combine([ratio(each, E) for each in (1.001, 0.999, 1.0, 1.0005)], 0.01)
    assert same.verdict is E
    slower = combine([ratio(each, S) for each in (0.95, 0.951, 0.949, 0.95)], 0.01)
    assert slower.verdict is S


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=12), st.randoms(use_true_random=False))
def test_the_order_of_machines_does_not_matter(values: list[float], chance: random.Random) -> None:
    results = [ratio(value, U) for value in values]
    first = combine(results, 0.01)
    chance.shuffle(results)
    second = combine(results, 0.01)
    assert second.verdict is first.verdict
    assert (second.low, second.high) == (pytest.approx(first.low), pytest.approx(first.high))
    assert first.low <= first.ratio * (1 + 1e-12)
    assert first.ratio <= first.high * (1 + 1e-12)


def test_no_machine_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected"):
        combine([], 0.01)


def test_who_is_far_off() -> None:
    alike = {"a": 1.0, "b": 1.01, "c": 0.99, "d": 1.5}
    assert is_far_off(deviation(alike, "d"))
    assert not is_far_off(deviation(alike, "a"))
    assert deviation({"a": 1.0, "b": 2.0, "c": 1.0}, "b") is None  # of three, nobody can say who is off
    assert deviation(alike, "x") is None
    # One odd case is no reason.
    usual = [{"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}] * 3
    assert not is_far_off(usual_deviation([alike, *usual], "d"))
    assert is_far_off(usual_deviation([alike, alike, *usual[:1]], "d"))
    assert usual_deviation([], "d") is None
    assert not is_far_off(None)
    # Half of them are slow: those are off, and the others are not.
    halves = {"a": 1.0, "b": 1.01, "c": 1.3, "d": 1.31}
    assert [is_far_off(deviation(halves, unit)) for unit in "abcd"] == [False, False, True, True]


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=20))
def test_somebody_is_always_left_to_ask(latencies: list[float]) -> None:
    fleet = {str(number): latency for number, latency in enumerate(latencies)}
    assert not all(is_far_off(deviation(fleet, unit)) for unit in fleet)
