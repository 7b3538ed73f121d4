"""What a latency is: the clock of the device, and what lies between its two readings.

A timer turns one implementation's prepared calls (one per input set) into a ``Measure``. CUDA's timers are in
``cuda_timers``.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Protocol

from torch import Tensor

from cudadent42.bench.flush import Flush
from cudadent42.implementations import Call

CPU_WINDOW_S = 3e-3
"""Shortest time between two clock readings on CPU. The clock itself resolves 0.1 µs; the window is longer
because the noise of a shared machine (timer interrupts, other tenants) comes in bursts of up to a
millisecond, and windows of 0.2 ms showed twice to three times the spread of 3 ms ones."""

MAX_INNER = 10_000


@dataclass(frozen=True)
class Reading:
    """One sample."""

    latency_ms: float
    """Per call."""
    inner: int
    """Calls that it averages."""
    output: Tensor
    """Of the last call."""
    input_set: int
    """Which input set the last call used."""


class Timer(Protocol):
    """Prepares a measurement; called once per implementation and case, after warm-up of the machine."""

    def calibrate(self, calls: Sequence[Call]) -> Callable[[], Reading]: ...


class ClockTimer:
    """Host clock around a run of calls over rotating inputs."""

    def __init__(self, flush: Flush | None) -> None:
        self._flush = flush

    def calibrate(self, calls: Sequence[Call]) -> Callable[[], Reading]:
        """Chooses how many calls fill the window: one with a cold cache, which only the first call would
        find."""
        inner = 1 if self._flush else calls_for_window(calls, CPU_WINDOW_S)
        sequence = list(islice(cycle(calls), inner))
        last_set = (inner - 1) % len(calls)
        flush = self._flush

        def read() -> Reading:
            if flush:
                flush()
            elif inner > 1:
                calls[-1]()  # short calls meet their code and threads awake, as in the rest of the window
            with collector_off():
                start = time.perf_counter_ns()
                for call in sequence:
                    output = call()
                stop = time.perf_counter_ns()
            return Reading((stop - start) / inner / 1e6, inner, output, last_set)

        return read


def calls_for_window(calls: Sequence[Call], window_s: float) -> int:
    """How many calls take ``window_s``: from runs of doubling length, each the fastest of a few, since a
    run that was preempted looks long enough when it is not."""
    count = 1
    while True:
        sequence = list(islice(cycle(calls), count))
        elapsed = _fastest(sequence, window_s)
        if elapsed >= window_s / 4 or count >= MAX_INNER:
            return max(1, min(MAX_INNER, round(window_s / elapsed * count)))
        count *= 2


def _fastest(sequence: Sequence[Call], enough_s: float) -> float:
    """Seconds of the fastest of three runs; one is enough where it takes far longer than a window."""
    fastest = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for call in sequence:
            call()
        fastest = min(fastest, time.perf_counter() - start)
        if fastest > 10 * enough_s:
            break
    return fastest


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection inside a timed window."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
