"""Processor time of this process and of every process that it started: what code costs, whoever else uses the machine.

It is the right clock on a busy machine, for code that works while it is called. It does not see code that waits for
somebody else's work (``idle_share`` finds that), and it counts threads that spin while they wait.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

MOST_IDLE = 0.25
"""Of the time of its calls, that nothing of this process may have been running or ready to. Of a call that computes,
the share is about 0; beyond a quarter, what the clock does not see may exceed the margin many times."""

_IDLE_WINDOWS = 5
_CHILD_CLOCK = 2
"""Linux's number of a process's scheduled time, beside its id (clock_getcpuclockid(3))."""


class ProcessorClock:
    """Nanoseconds that all threads of this process and of its descendants were running.

    ``look_around`` has to be called outside a window for children that were started since; a child that is born and
    waited for inside the window counts in any case.
    """

    def __init__(self) -> None:
        self._children: tuple[int, ...] = ()

    def look_around(self) -> None:
        self._children = tuple(descendants())

    def __call__(self) -> int:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        total = time.process_time_ns() + round(1e9 * (ended.ru_utime + ended.ru_stime))
        return total + sum(map(process_ns, self._children))


def process_ns(process: int) -> int:
    """That a process's threads were running. 0 for one that has ended: it counts among those that were waited for."""
    try:
        return time.clock_gettime_ns((~process << 3) | _CHILD_CLOCK)
    except OSError:
        return 0


def descendants(process: str = "self") -> list[int]:
    """Process ids of the living children, theirs, and so on; none where Linux does not list them."""
    processes: list[int] = []
    waiting = [process]
    while waiting:
        tasks = Path(f"/proc/{waiting.pop()}/task")
        try:
            children = [
                child for task in tasks.iterdir() for child in (task / "children").read_text().split()
            ]
        except OSError:  # it ended while it was read
            continue
        processes += map(int, children)
        waiting += children
    return processes


def idle_share(work: Callable[[], object], waited_s: Callable[[], float]) -> float:
    """Of the time that ``work`` takes: how much nothing of this process was running or ready to, at the least of a few
    times (a hypervisor that takes the machine away looks the same). NaN where Linux does not tell.

    ``waited_s``: seconds that this process's threads have been ready but not running.
    """
    clock = ProcessorClock()
    shares = []
    for _ in range(_IDLE_WINDOWS):
        clock.look_around()
        wall, busy = time.perf_counter(), clock() / 1e9 + waited_s()
        work()
        clock.look_around()
        busy = clock() / 1e9 + waited_s() - busy
        shares.append(1.0 - busy / (time.perf_counter() - wall))
    return min(shares)
