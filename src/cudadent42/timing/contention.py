"""Whether this machine's processors are to be had: which timer a run on CPU takes, unless it is told one.

As many threads as the process may use processors work for a moment, and Linux says how long each of them was ready but
not running. No torch: a plan is made before it is imported.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WAIT_LIMIT = 0.02
"""A stretch of work is disturbed if its threads were kept from running for more than this share of it."""

PROBE_S = 0.4
"""A hundred time slices of a scheduler that shares a processor between two programs."""

WINDOW_S = 10e-3
"""About a block of short calls. A window counts as disturbed by the rule of blocks (``WAIT_LIMIT``)."""

BUSY_SHARE = 0.2
"""Of the windows of the threads. Threads are disturbed independently, so a block of a call on two threads is then
disturbed in 36 %, and on four in 59 %, where half is the most that allows a verdict (`decisions.compare`)."""

_WORK = bytes(1 << 18)
"""What is hashed between two looks at the clock, 0.2 ms; outside the interpreter's lock, so that threads run side by
side."""


@dataclass(frozen=True)
class Contention:
    """What the threads saw."""

    windows: int
    """0 where Linux does not tell."""
    disturbed: int
    waited_share: float
    """Of the threads' time, that they were ready but not running."""

    @property
    def busy(self) -> bool:
        return self.disturbed > BUSY_SHARE * self.windows


@dataclass(frozen=True)
class Window:
    """Some work of one thread."""

    duration_s: float
    waited_s: float
    """Ready but not running; NaN where Linux does not tell, and then it counts as undisturbed."""

    @property
    def disturbed(self) -> bool:
        return self.waited_s > WAIT_LIMIT * self.duration_s


def probe() -> Contention:
    """Takes the processors for ``PROBE_S``."""
    seen: list[Window] = []
    stop = time.perf_counter() + PROBE_S
    threads = [threading.Thread(target=_work, args=(stop, seen)) for _ in range(_processors())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return judge(seen)


def _processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def judge(windows: Sequence[Window]) -> Contention:
    total_s = sum(window.duration_s for window in windows)
    return Contention(
        len(windows),
        sum(window.disturbed for window in windows),
        sum(window.waited_s for window in windows) / total_s if total_s else 0.0,
    )


def _work(stop: float, seen: list[Window]) -> None:
    """Windows of work until ``stop``."""
    try:
        began, waited = time.perf_counter(), _waited_s()
        while began < stop:
            while time.perf_counter() < began + WINDOW_S:
                hashlib.sha256(_WORK).digest()
            now, waited_now = time.perf_counter(), _waited_s()
            seen.append(Window(now - began, waited_now - waited))
            began, waited = now, waited_now
    except (OSError, IndexError):  # not Linux, or one that does not tell
        return


def _waited_s() -> float:
    """Of this thread."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def waited_s() -> float:
    """Seconds that this process's threads have spent ready but not running; NaN where Linux does not say."""
    tasks = "/proc/self/task"
    try:
        return sum(int(_words(f"{tasks}/{task}/schedstat")[1]) for task in os.listdir(tasks)) / 1e9
    except (OSError, IndexError):
        return math.nan


def _words(path: str) -> list[bytes]:
    """Of a short file; without the layers of `open`, which take longer than reading it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 12).split()
    finally:
        os.close(descriptor)
