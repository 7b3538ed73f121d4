"""Timers for CUDA: events around each call (launch included); graph replay and queued calls (GPU time alone)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cudadent42.model.implementations import Call
from cudadent42.timing.flush import Flush
from cudadent42.timing.timers import Reading

EVENT_WINDOW_MS = 1.0
EVENT_MIN_CALLS, EVENT_MAX_CALLS = 3, 20
"""A sample is the median of calls that are timed one by one: 20 short ones or 3 long ones."""

GPU_WINDOW_MS = 2.0
"""Shortest time between two events where GPU time alone is measured."""
GRAPH_MAX_CALLS = 200
"""Copies in a graph: enough that the events' own cost (about 2 µs) stays below 0.2 % of the window."""

COLD_WINDOWS = 10
"""Of one call each, whose median counts."""

QUEUE_MAX_CALLS = 20
"""A call of many small kernels launches dozens, and the driver queues about a thousand before a launch waits."""

_FIRST_SPIN_CYCLES = 1_000_000
_MOST_SPIN_CYCLES = 256_000_000
"""0.5 ms to begin with, and about 0.13 s, within which the host has long launched what can be queued."""

_ESTIMATE_CALLS = 5

_HIDE_LAUNCH_CYCLES = 100_000
"""50 to 100 µs on today's GPUs; launching a graph of 200 kernels takes the host about 20 µs."""


class CudaEventTimer:
    """Two events around each call on an idle stream, so the GPU waits for the launch and its cost is
    included."""

    def __init__(self, device: str, flush: Flush | None) -> None:
        self._device = device
        self._flush = flush
        self._start, self._stop = _event_pair()

    def calibrate(self, calls: Sequence[Call], inner: int | None = None) -> Callable[[], Reading]:
        count = self._count(calls) if inner is None else inner
        last_set = (count - 1) % len(calls)

        def read() -> Reading:
            times: list[float] = []
            tails: list[float] = []
            for index in range(count):
                elapsed, tail, output = self._time(calls[index % len(calls)])
                times.append(elapsed)
                tails.append(tail)
            return Reading(median(times), count, output, last_set, median(tails))

        return read

    def _count(self, calls: Sequence[Call]) -> int:
        estimate = min(self._time(calls[i % len(calls)])[0] for i in range(_ESTIMATE_CALLS))
        wanted = math.ceil(EVENT_WINDOW_MS / max(estimate, 1e-3))
        return max(len(calls), min(EVENT_MAX_CALLS, max(EVENT_MIN_CALLS, wanted)))

    def _time(self, call: Call) -> tuple[float, float, Tensor]:
        """Milliseconds of the call, those that the GPU was busy after it, and the output."""
        if self._flush:
            self._flush()
        torch.cuda.synchronize(self._device)
        self._start.record()
        output = call()
        self._stop.record()
        tail = tail_ms(self._stop, self._device)
        return float(self._start.elapsed_time(self._stop)), tail, output


class CudaGraphTimer:
    """Replays a graph of many calls over rotating inputs and divides; with a cold cache, of one call."""

    def __init__(self, device: str, flush: Flush | None) -> None:
        self._device = device
        self._flush = flush
        self._start, self._stop = _event_pair()

    def calibrate(self, calls: Sequence[Call], inner: int | None = None) -> Callable[[], Reading]:
        replays = COLD_WINDOWS if self._flush else 1
        copies = 1 if self._flush else self._copies(calls) if inner is None else inner // replays
        captured = capture(calls, copies, self._device)
        last_set = (copies - 1) % len(calls)

        def read() -> Reading:
            taken = [self._replay(captured.graph) for _ in range(replays)]
            times = [elapsed / copies for elapsed, _ in taken]
            tails = [tail for _, tail in taken]
            return Reading(median(times), copies * replays, captured.output, last_set, median(tails))

        return read

    def _copies(self, calls: Sequence[Call]) -> int:
        captured = capture(calls, _ESTIMATE_CALLS, self._device)
        estimate = min(self._replay(captured.graph)[0] for _ in range(3)) / _ESTIMATE_CALLS
        return _calls_for_window(estimate, len(calls), GRAPH_MAX_CALLS)

    def _replay(self, graph: torch.cuda.CUDAGraph) -> tuple[float, float]:
        """Milliseconds of one replay, and those that the GPU was busy after it.

        Work is queued ahead of the first event (the flush, or a kernel that spins), so the graph is already
        launched when the event's time is taken and its launch is not in the window.
        """
        torch.cuda.synchronize(self._device)
        if self._flush:
            self._flush()
        torch.cuda._sleep(_HIDE_LAUNCH_CYCLES)  # type: ignore[no-untyped-call]
        self._start.record()
        graph.replay()
        self._stop.record()
        tail = tail_ms(self._stop, self._device)
        return float(self._start.elapsed_time(self._stop)), tail


class CudaQueueTimer:
    """Two events around calls that wait in the stream behind a kernel that spins, so that all are launched before the
    first begins. Where a graph cannot be used: some code captures without an error and computes nonsense in replays.

    After NVBench's measurement of isolated kernels, which blocks the stream likewise.
    """

    def __init__(self, device: str, flush: Flush | None) -> None:
        self._device = device
        self._flush = flush
        self._start, self._stop = _event_pair()
        self._spin_cycles = _FIRST_SPIN_CYCLES

    def calibrate(self, calls: Sequence[Call], inner: int | None = None) -> Callable[[], Reading]:
        """Raises RuntimeError for a call that waits for the GPU: it cannot be launched ahead."""
        repeats = COLD_WINDOWS if self._flush else 1
        count = 1 if self._flush else self._count(calls) if inner is None else inner // repeats
        last_set = (count - 1) % len(calls)

        def read() -> Reading:
            timed = [self._time(calls, count) for _ in range(repeats)]
            times, tails = [each[0] for each in timed], [each[1] for each in timed]
            return Reading(median(times), count * repeats, timed[-1][2], last_set, median(tails))

        return read

    def _count(self, calls: Sequence[Call]) -> int:
        estimate = min(self._time(calls, _ESTIMATE_CALLS)[0] for _ in range(3))
        return _calls_for_window(estimate, len(calls), QUEUE_MAX_CALLS)

    def _time(self, calls: Sequence[Call], count: int) -> tuple[float, float, Tensor]:
        """Milliseconds per call of ``count`` calls, those that the GPU was busy after them, the last one's output."""
        while True:
            torch.cuda.synchronize(self._device)
            if self._flush:
                self._flush()
            torch.cuda._sleep(self._spin_cycles)  # type: ignore[no-untyped-call]
            self._start.record()
            for index in range(count):
                output = calls[index % len(calls)]()
            self._stop.record()
            # Whether the GPU was done spinning before all was launched.
            overtaken = self._start.query()  # type: ignore[no-untyped-call]
            tail = tail_ms(self._stop, self._device)
            if not overtaken:
                return float(self._start.elapsed_time(self._stop)) / count, tail, output
            if self._spin_cycles >= _MOST_SPIN_CYCLES:
                self._spin_cycles = _FIRST_SPIN_CYCLES
                raise RuntimeError(
                    f"{count} calls could not be queued: a call waits for the GPU, or launches too much; "
                    "use the timer call"
                )
            self._spin_cycles *= 2


def tail_ms(stop: torch.cuda.Event, device: str) -> float:
    """How long any stream of the device goes on after an event: what a stream that nobody joined does is not between
    the events of the one that the calls were made on. Some microseconds where all is done."""
    stop.synchronize()
    reached = time.perf_counter()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - reached) * 1e3


def _calls_for_window(estimate_ms: float, sets: int, most: int) -> int:
    """How many calls of that length fill the window: each input set at least once."""
    return max(sets, min(most, math.ceil(GPU_WINDOW_MS / max(estimate_ms, 1e-4))))


@dataclass(frozen=True)
class Captured:
    """A graph with what its replays read: it knows addresses alone, in memory that calls may own."""

    graph: torch.cuda.CUDAGraph
    output: Tensor
    """Of the last call."""
    calls: tuple[Call, ...]


def capture(calls: Sequence[Call], copies: int, device: str) -> Captured:
    """A graph of ``copies`` calls in rotation.

    Raises RuntimeError where an implementation cannot be captured (it synchronises, or allocates by itself).
    """
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(copies):
            output = calls[index % len(calls)]()
    return Captured(graph, output, tuple(calls))


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Recorded once: CUDA creates an event at its first record, which would be inside the first window."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    stop.record()
    return start, stop
