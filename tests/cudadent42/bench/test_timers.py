from __future__ import annotations

import gc
import time
from collections import Counter

import torch
from torch import Tensor

from cudadent42.bench.flush import DEFAULT_CACHE_BYTES, cache_bytes
from cudadent42.bench.timers import CPU_WINDOW_S, MAX_INNER, ClockTimer, calls_for_window, collector_off


class Sleeper:
    """A call of known length that counts itself."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls = 0
        self.result = torch.zeros(1)

    def __call__(self) -> Tensor:
        self.calls += 1
        time.sleep(self.seconds)
        return self.result


def test_long_calls_are_timed_alone() -> None:
    sleeper = Sleeper(2 * CPU_WINDOW_S)
    reading = ClockTimer(None).calibrate([sleeper])()
    assert reading.inner == 1
    assert reading.latency_ms >= 2e3 * CPU_WINDOW_S


def test_short_calls_fill_the_window() -> None:
    reading = ClockTimer(None).calibrate([Sleeper(1e-4)])()
    assert 2 <= reading.inner <= CPU_WINDOW_S / 1e-4
    assert reading.latency_ms >= 0.1  # per call, not per window


def test_one_slow_first_call_does_not_set_the_window() -> None:
    sleeper = Sleeper(1e-4)

    def cold() -> Tensor:
        if sleeper.calls == 0:
            time.sleep(20 * CPU_WINDOW_S)
        return sleeper()

    assert ClockTimer(None).calibrate([cold])().inner >= 2


def test_nothing_is_called_without_end() -> None:
    result = torch.zeros(1)
    assert calls_for_window([lambda: result], 100.0) <= MAX_INNER


def test_inputs_rotate_and_the_last_is_known() -> None:
    sleepers = [Sleeper(1e-4) for _ in range(3)]
    read = ClockTimer(None).calibrate(sleepers)
    for sleeper in sleepers:
        sleeper.calls = 0
    reading = read()
    calls = [sleeper.calls for sleeper in sleepers]
    assert sum(calls) == reading.inner + 1  # one untimed call ahead
    assert max(calls) - min(calls) <= 2
    assert reading.output is sleepers[reading.input_set].result
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
