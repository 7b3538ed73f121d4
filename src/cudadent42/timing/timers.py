"""What a latency is: the clock of the device, and what lies between its two readings.

A timer turns one implementation's prepared calls (one per input set) into a ``Measure``. CUDA's timers are in
``cuda_timers``.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Protocol

from torch import Tensor

from cudadent42.model.implementations import Call
from cudadent42.model.records import TimerKind
from cudadent42.timing.contention import Window, waited_s
from cudadent42.timing.flush import INPUT_SETS, Flush

CPU_WINDOW_S = 3e-3
"""Shortest time between two clock readings on CPU. The clock itself resolves 0.1 µs; the window is longer
because the noise of a shared machine (timer interrupts, other tenants) comes in bursts of up to a
millisecond, and windows of 0.2 ms showed twice to three times the spread of 3 ms ones."""

PROCESSOR_WINDOW_S = 3e-4
"""The window where processor time is measured. Others who use the machine do not count in it, only what they do to
caches and to the core's clock; that lasts for a time slice of some milliseconds, within which the sides should
alternate often. On a machine with four times more work than cores, windows of 0.3 ms gave a twentieth of the error
that the same time in windows of 3 ms did."""

MOST_PASSES = 15
"""Windows of processor time of each implementation in a block, by turns, of which the median counts."""

PASSES_S = 15e-3
"""What the windows of one implementation may take in a block: fewer than ``MOST_PASSES`` where its calls are long. A
call that lasts several time slices averages over what happens in them by itself."""

MAX_INNER = 10_000

QUIET_RUNS, MOST_RUNS = 3, 20
"""Of calls, to learn how many fill a window. With one competitor for each of two processors about one short run in
eight is quiet."""


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
    tail_ms: float = 0.0
    """How long the GPU was busy after the event that ended the window."""


def passes_for(timer: TimerKind, slowest_window_s: float) -> int:
    """How many windows each implementation has in a block; one with the timers that read the clock on the wall or the
    GPU's."""
    if timer is not TimerKind.CPU:
        return 1
    return max(1, min(MOST_PASSES, int(PASSES_S / max(slowest_window_s, 1e-9))))


def median_reading(readings: Sequence[Reading]) -> Reading:
    """The last one, with the median of the latencies."""
    return replace(readings[-1], latency_ms=statistics.median(each.latency_ms for each in readings))


class Timer(Protocol):
    """Prepares a measurement; called once per implementation and case, after warm-up of the machine."""

    def calibrate(self, calls: Sequence[Call], inner: int | None = None) -> Callable[[], Reading]:
        """``inner``: ``Reading.inner`` to have, as another implementation has; None: what suits these calls.

        Where versions are raced, all have the same: the first calls of a window cost more than those after them, so a
        window of three calls and one of four differ by a percent for the same code.
        """


def _nothing() -> None:
    return


class ClockTimer:
    """Host clock around a run of calls over rotating inputs.

    ``clock_ns``: wall time, or the time that this process's threads and children were running, which is told of
    children by ``look_around``, ahead of each window. ``waited_s``: seconds that threads of this process have been
    ready but not running.
    """

    def __init__(
        self,
        flush: Flush | None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        window_s: float = CPU_WINDOW_S,
        look_around: Callable[[], None] = _nothing,
        waited_s: Callable[[], float] = waited_s,
    ) -> None:
        self._waited_s = waited_s
        self._flush = flush
        self._look_around = look_around
        self._clock_ns = clock_ns
        self._window_s = window_s

    def calibrate(self, calls: Sequence[Call], inner: int | None = None) -> Callable[[], Reading]:
        """Unless it is given, chooses how many calls fill the window: one with a cold cache, which only the first call
        would find, and where a cache is rotated at least one for each input set."""
        if inner is None:
            inner = (
                1 if self._flush else calls_for_window(calls, self._window_s, self._clock_ns, self._waited_s)
            )
            if len(calls) > INPUT_SETS:
                inner = max(inner, len(calls))
        sequence = list(islice(cycle(calls), inner))
        last_set = (inner - 1) % len(calls)
        flush, clock_ns, look_around = self._flush, self._clock_ns, self._look_around

        def read() -> Reading:
            look_around()
            if flush:
                flush()
            elif inner > 1:
                calls[-1]()  # short calls meet their code and threads awake, as in the rest of the window
            with collector_off():
                start = clock_ns()
                for call in sequence:
                    output = call()
                stop = clock_ns()
            return Reading((stop - start) / inner / 1e6, inner, output, last_set)

        return read


def calls_for_window(
    calls: Sequence[Call],
    window_s: float,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    waited_s: Callable[[], float] = waited_s,
) -> int:
    """How many calls take ``window_s``: from runs of doubling length, each the fastest of a few, since a
    run that was preempted looks long enough when it is not."""
    count = 1
    while True:
        sequence = list(islice(cycle(calls), count))
        elapsed = _fastest(sequence, window_s, clock_ns, waited_s)
        if elapsed >= window_s / 4 or count >= MAX_INNER:
            return max(1, min(MAX_INNER, round(window_s / max(elapsed, 1e-9) * count)))
        count *= 2


def _fastest(
    sequence: Sequence[Call], enough_s: float, clock_ns: Callable[[], int], waited_s: Callable[[], float]
) -> float:
    """Seconds of the fastest of three runs in which no thread waited for a processor, and of those before them, up to
    ``MOST_RUNS``; two are enough where they take far longer than a window.

    Never one: a first call that was preempted, or met cold code, would set the window of a whole case. On several
    threads a call that is preempted takes a time slice, which is longer than a window, whatever it takes itself: its
    windows would then hold one call, with cold code and threads asleep, for as long as the case is measured.
    """
    fastest, quiet = float("inf"), 0
    for attempt in range(MOST_RUNS):
        before, start = waited_s(), clock_ns()
        for call in sequence:
            call()
        took_s = (clock_ns() - start) / 1e9
        fastest = min(fastest, took_s)
        quiet += not Window(took_s, waited_s() - before).disturbed
        if quiet == QUIET_RUNS or (attempt and fastest > 10 * enough_s):
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
