"""How long calls take, without waiting for any: by the clock on a CPU, by events that are read later on CUDA."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

Take = Callable[[float], None]
"""Given a call's seconds when they are there, at once or later."""

_DRAIN_EVERY = 256
"""Pending calls on CUDA, from which on those that are done are read."""


class SharedClock:
    """Seconds of calls that may overlap: while n of them run, each is given an n-th of the time.

    So the calls of all threads together never take longer than the clock on the wall.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._running = 0
        self._last = 0.0
        self._shared = 0.0
        """Seconds that a call would have been given which has run from the beginning."""
        self.overlapped = False

    def begin(self) -> float:
        """To be handed to `end`."""
        with self._lock:
            self._go_on()
            self._running += 1
            self.overlapped = self.overlapped or self._running > 1
            return self._shared

    def end(self, began: float) -> float:
        """The call's seconds."""
        with self._lock:
            self._go_on()
            self._running -= 1
            return self._shared - began

    def _go_on(self) -> None:
        now = self._now()
        if self._running:
            self._shared += (now - self._last) / self._running
        self._last = now


class CudaEvents:
    """Pairs of events around calls. They are asked for the time when the device has passed them, never waited for
    before the end."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Take, int, Any, Any]] = deque()
        self._spare: dict[int, list[Any]] = defaultdict(list)
        """By device: an event belongs to that on which it was recorded first."""
        self._lock = threading.Lock()

    def begin(self, device: torch.device) -> Any:
        """An event on the stream of the calls' device, which need not be the current one."""
        event = self._event(device)
        event.record(torch.cuda.current_stream(device))
        return event

    def end(self, began: Any, take: Take, device: torch.device) -> None:
        event = self._event(device)
        event.record(torch.cuda.current_stream(device))
        with self._lock:
            self._pending.append((take, _index(device), began, event))
            if len(self._pending) >= _DRAIN_EVERY:
                self._read(wait=False)

    def finish(self) -> None:
        """Waits for all that is pending."""
        with self._lock:
            self._read(wait=True)

    def forget(self) -> None:
        with self._lock:
            self._pending.clear()

    def _event(self, device: torch.device) -> Any:
        try:
            return self._spare[_index(device)].pop()
        except IndexError:
            return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def _read(self, *, wait: bool) -> None:
        while self._pending:
            take, index, began, ended = self._pending[0]
            if wait:
                ended.synchronize()
            elif not ended.query():
                return
            self._pending.popleft()
            take(began.elapsed_time(ended) / 1e3)
            self._spare[index] += (began, ended)


def _index(device: torch.device) -> int:
    """A tensor's device has one."""
    assert device.index is not None
    return device.index
