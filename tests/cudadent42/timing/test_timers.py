from __future__ import annotations

import gc
import time
from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor

from cudadent42.timing.flush import DEFAULT_CACHE_BYTES, cache_bytes
from cudadent42.timing.timers import (
    CPU_WINDOW_S,
    MAX_INNER,
    MOST_RUNS,
    ClockTimer,
    calls_for_window,
    collector_off,
)


class Clock:
    """Stands still but for the calls that take time, so that no other work on the machine decides a test."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class TimedCall:
    """A call of known length that counts itself."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock = clock
        self.seconds = seconds
        self.calls = 0
        self.result = torch.zeros(1)

    def __call__(self) -> Tensor:
        self.calls += 1
        self.clock.now_ns += round(1e9 * self.seconds)
        return self.result


def test_long_calls_are_timed_alone() -> None:
    clock = Clock()
    reading = ClockTimer(None, clock).calibrate([TimedCall(clock, 2 * CPU_WINDOW_S)])()
    assert reading.inner == 1
    assert reading.latency_ms == pytest.approx(2e3 * CPU_WINDOW_S)


def test_short_calls_fill_the_window() -> None:
    clock = Clock()
    reading = ClockTimer(None, clock).calibrate([TimedCall(clock, 1e-4)])()
    assert reading.inner == CPU_WINDOW_S / 1e-4
    assert reading.latency_ms == pytest.approx(0.1)  # per call, not per window


def test_the_clock_is_the_machines_own() -> None:
    call = partial(time.sleep, 2 * CPU_WINDOW_S)
    reading = ClockTimer(None).calibrate([lambda: call() or torch.zeros(1)])()
    assert reading.latency_ms >= 2e3 * CPU_WINDOW_S


def test_one_slow_first_call_does_not_set_the_window() -> None:
    clock = Clock()
    timed = TimedCall(clock, 1e-4)

    def cold() -> Tensor:
        if timed.calls == 0:
            clock.now_ns += round(20e9 * CPU_WINDOW_S)
        return timed()

    assert ClockTimer(None, clock).calibrate([cold])().inner == CPU_WINDOW_S / 1e-4


def test_nothing_is_called_without_end() -> None:
    result = torch.zeros(1)
    assert calls_for_window([lambda: result], 100.0) <= MAX_INNER


def test_inputs_rotate_and_the_last_is_known() -> None:
    clock = Clock()
    timed = [TimedCall(clock, 1e-4) for _ in range(3)]
    read = ClockTimer(None, clock).calibrate(timed)
    for each in timed:
        each.calls = 0
    reading = read()
    calls = [each.calls for each in timed]
    assert sum(calls) == reading.inner + 1  # one untimed call ahead
    assert max(calls) - min(calls) <= 2
    assert reading.output is timed[reading.input_set].result
    assert reading.input_set == (reading.inner - 1) % 3


def test_cold_cache_is_flushed_before_each_single_call() -> None:
    order: list[str] = []

    def call() -> Tensor:
        order.append("call")
        return torch.zeros(1)

    read = ClockTimer(lambda: order.append("flush")).calibrate([call])
    for _ in range(3):
        assert read().inner == 1
    assert order == ["flush", "call"] * 3
    assert Counter(order)["flush"] == 3


def test_collector_is_off_in_the_window_and_back_after() -> None:
    assert gc.isenabled()
    with collector_off():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_cache_size_is_plausible() -> None:
    assert 1 << 18 <= cache_bytes("cpu") <= max(DEFAULT_CACHE_BYTES, 1 << 31)


class Machine:
    """Calls of 0.02 ms, of which the first runs take a time slice each while a thread of theirs waits."""

    def __init__(self, disturbed: int) -> None:
        self.disturbed = disturbed
        self.now_s = self.waited_s = 0.0
        self.runs = 0

    def clock_ns(self) -> int:
        self.runs += 1
        if self.runs % 2 == 0 and self.runs <= 2 * self.disturbed:  # the end of a run
            self.now_s += 8e-3
            self.waited_s += 8e-3
        return round(1e9 * self.now_s)

    def call(self) -> Tensor:
        self.now_s += 2e-5
        return torch.zeros(())


@pytest.mark.parametrize("disturbed", [0, 1, 5, 16])
def test_time_slices_of_others_do_not_fill_a_window(disturbed: int) -> None:
    """Runs that waited for a processor are followed by others, until three have not."""
    machine = Machine(disturbed)
    count = calls_for_window([machine.call], CPU_WINDOW_S, machine.clock_ns, lambda: machine.waited_s)
    assert count == 150


def test_a_machine_that_is_never_quiet_is_waited_for_only_so_long() -> None:
    machine = Machine(10**6)
    assert calls_for_window([machine.call], CPU_WINDOW_S, machine.clock_ns, lambda: machine.waited_s) == 1
    assert machine.runs == 2 * MOST_RUNS
