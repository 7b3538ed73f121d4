"""Processor time of this process and of every process that it started: what code costs, whoever else uses the machine.

It is the right clock on a busy machine, for code that works while it is called. It does not see code that waits for
somebody else's work (``idle_share`` finds that), and it counts threads that spin while they wait.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MOST_IDLE = 0.25
"""Of the time of its calls, that nothing of this process may have been running or ready to. Of a call that computes,
the share is about 0; beyond a quarter, what the clock does not see may exceed the margin many times."""

_IDLE_WINDOWS, _MOST_IDLE_WINDOWS = 5, 30
"""Looks, and how many where all so far found too much: how long a thread waited for a processor is lost when it ends,
so on a busy machine code that starts threads looks idle now and then."""

LOOK_AGAIN_S = 0.05
"""After which processes are looked for again that left the tree."""

_CHILD_CLOCK = 2
"""Linux's number of a process's scheduled time, beside its id (clock_getcpuclockid(3))."""


class ProcessorClock:
    """Nanoseconds that all threads of this process and of its descendants were running.

    ``look_around`` has to be called outside a window for children that were started since; a child that is born and
    waited for inside the window counts in any case.
    """

    def __init__(self, kin: Kin | None = None) -> None:
        self._kin = kin or Kin()
        self._children: tuple[int, ...] = ()
        self._left: tuple[int, ...] = ()
        self._looked_s = -LOOK_AGAIN_S

    def look_around(self) -> None:
        if self._kin.keeper is not None and time.monotonic() - self._looked_s > LOOK_AGAIN_S:
            self._left, self._looked_s = tuple(self._kin.left()), time.monotonic()
        self._children = (*descendants(), *self._left)

    def __call__(self) -> int:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        total = time.process_time_ns() + round(1e9 * (ended.ru_utime + ended.ru_stime))
        return total + sum(map(process_ns, self._children))


@dataclass(frozen=True)
class Kin:
    """What came of this process: all that is below it, and what has left from there for ``keeper``, the process above
    that takes in orphans. Without a keeper nobody knows where they went."""

    keeper: int | None = None

    def left(self) -> list[int]:
        """Living processes that are below the keeper and not below this one."""
        if self.keeper is None:
            return []
        left = [process for process in children(self.keeper) if process != os.getpid()]
        return [*left, *(below for process in left for below in descendants(str(process)))]

    def processes(self) -> list[int]:
        """All that live."""
        return [*descendants(), *self.left()]

    def lost_ns(self) -> int:
        """That orphans were running that have ended: the keeper has waited for them. To 10 ms."""
        if self.keeper is None:
            return 0
        try:
            fields = Path(f"/proc/{self.keeper}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            return 0
        return sum(map(int, fields[13:15])) * (1_000_000_000 // os.sysconf("SC_CLK_TCK"))


def process_ns(process: int) -> int:
    """That a process's threads were running. 0 for one that has ended: it counts among those that were waited for."""
    try:
        return time.clock_gettime_ns((~process << 3) | _CHILD_CLOCK)
    except OSError:
        return 0


def children(process: int | str) -> list[int]:
    """Process ids of the living children; none where Linux does not list them."""
    tasks = f"/proc/{process}/task"
    try:
        return [int(child) for task in os.listdir(tasks) for child in _words(f"{tasks}/{task}/children")]
    except OSError:  # it ended while it was read
        return []


def _words(path: str) -> list[bytes]:
    """Of a file; without the layers of `open`, which take longer than reading it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        text = b""
        while data := os.read(descriptor, 1 << 16):
            text += data
    finally:
        os.close(descriptor)
    return text.split()


def descendants(process: str = "self") -> list[int]:
    """The living children, theirs, and so on."""
    processes: list[int] = []
    waiting = children(process)
    while waiting:
        processes += waiting
        waiting = [child for each in waiting for child in children(each)]
    return processes


def idle_share(work: Callable[[], object], waited_s: Callable[[], float]) -> float:
    """Of the time that ``work`` takes: how much nothing of this process was running or ready to, at the least of a few
    times (a hypervisor that takes the machine away looks the same). NaN where Linux does not tell.

    ``waited_s``: seconds that this process's threads have been ready but not running.
    """
    clock = ProcessorClock()
    shares: list[float] = []
    for number in range(_MOST_IDLE_WINDOWS):
        if number >= _IDLE_WINDOWS and not min(shares) > MOST_IDLE:
            break
        clock.look_around()
        wall, busy = time.perf_counter(), clock() / 1e9 + waited_s()
        work()
        clock.look_around()
        busy = clock() / 1e9 + waited_s() - busy
        shares.append(1.0 - busy / (time.perf_counter() - wall))
    return min(shares)
