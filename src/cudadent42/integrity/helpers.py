"""Threads and child processes that work while nobody calls anything: what they do is timed with somebody else's calls,
or not at all.

Pools that wait for work are no helpers in this sense, however many threads they have. OpenMP's threads spin for a while
after their work, Intel's and LLVM's for 0.2 s, so a process is given time to come to rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cudadent42.timing.processor_time import descendants

LOOKS, LOOK_S = 3, 1e-3
"""Of a probe: how often the tasks are looked at, and how long the caller sleeps before each look."""

REST_S = 1.0
"""Within which the process has to be found at rest once: several times the 0.2 s that OpenMP's threads may spin."""

FIRST_REST_S = 10.0
"""The same, right after an implementation was prepared: a compiler's processes may still be starting."""

AT_REST = 0.1
"""Processors that may be used during a probe of a process at rest."""

_THREAD_CLOCK, _PROCESS_CLOCK = 6, 2
"""Linux's numbers of the scheduled time of a thread and a process, beside the id (clock_getcpuclockid(3))."""


@dataclass(frozen=True)
class BackgroundWork:
    """What did not come to rest."""

    processors: float
    """That were used, on average."""
    names: tuple[str, ...]
    """Of the threads and processes, at most four."""

    @property
    def evidence(self) -> str:
        who = ", ".join(self.names) or "threads that end before they can be named"
        return (
            f"{who} worked on for {REST_S:g} s while nothing was called, on {self.processors:.1f} processors"
        )


def background_work(rest_s: float = REST_S) -> BackgroundWork | None:
    """What goes on while this thread sleeps; None as soon as there is nothing, mostly at once."""
    stop = time.monotonic() + rest_s
    while True:
        work = _probe()
        if work is None or time.monotonic() > stop:
            return work


def _probe() -> BackgroundWork | None:
    before, began = dict(_clocks()), time.perf_counter()
    ready: set[str] = set()
    for _ in range(LOOKS):
        time.sleep(LOOK_S)
        ready |= set(_ready())
    duration = time.perf_counter() - began
    used = {task: (now - before.get(task, now)) / duration for task, now in _clocks()}
    total = sum(used.values())
    if total < AT_REST and not ready:
        return None
    busy = dict.fromkeys([*ready, *(task for task in used if used[task] > AT_REST / 4)])
    return BackgroundWork(total, tuple(_name(task) for task in list(busy)[:4]))


def _tasks() -> Iterator[str]:
    """``pid/task/tid`` of all but this thread; nothing where Linux does not list them."""
    own = str(threading.get_native_id())
    for process in ("self", *map(str, descendants())):
        try:
            names = [each.name for each in Path(f"/proc/{process}/task").iterdir()]
        except OSError:  # it ended, or there is no /proc
            continue
        yield from (f"{process}/task/{name}" for name in names if process != "self" or name != own)


def _clocks() -> Iterator[tuple[str, float]]:
    """Seconds that each thread of this process, and each child, ran. Of a thread that was not there before, the
    process's clock tells."""
    for task in _tasks():
        process, _, number = task.split("/")
        own = process == "self"
        if not own and process != number:
            continue  # a child's clock has all of its threads
        clock = _THREAD_CLOCK if own else _PROCESS_CLOCK
        try:
            yield task, time.clock_gettime((~int(number) << 3) | clock)
        except OSError:
            continue


def _ready() -> Iterator[str]:
    """Tasks that run or would if they had a processor."""
    for task in _tasks():
        try:
            state = Path(f"/proc/{task}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if state == "R":
            yield task


def _name(task: str) -> str:
    kind = "thread" if task.startswith("self/") else "process"
    number = task.rpartition("/")[2]
    try:
        return f"{kind} {Path(f'/proc/{task}/comm').read_text().strip()!r} ({number})"
    except OSError:
        return f"{kind} {number}"
