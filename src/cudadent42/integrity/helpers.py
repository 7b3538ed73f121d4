"""Threads and child processes that work while nobody calls anything: what they do is timed with somebody else's calls,
or not at all.

Pools that wait for work are no helpers in this sense, however many threads they have. OpenMP's threads spin for a while
after their work, Intel's and LLVM's for 0.2 s, so a process is given time to come to rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cudadent42.timing.processor_time import Kin

LOOKS, LOOK_S = 3, 1e-3
"""Of a probe: how often the tasks are looked at, and how long the caller sleeps before each look."""

REST_S = 1.0
"""Within which the process has to be found at rest once: several times the 0.2 s that OpenMP's threads may spin."""

WORKED_S = 0.5
"""Of processors that its helpers have to have had meanwhile. On a busy machine they wait for one most of the time, so
what ends after 0.2 s of work may take seconds."""

MOST_REST_S = 15.0
"""After which nobody waits any longer for helpers that had less."""

FIRST_REST_S = 10.0
"""As ``REST_S``, right after an implementation was prepared: a compiler's processes may still be starting."""

AT_REST = 0.1
"""Processors that may be used during a probe of a process at rest."""

BESIDE_S, _MOST_TURNS = 5e-3, 50
"""Of the caller's own time that turns take beside which others are looked for, and how many these are at most."""

LEAST_BESIDE_S, SHARE_BESIDE = 5e-4, 0.2
"""That others have to work beside them, and of the caller's own time."""

MORE_BESIDE = 5.0
"""Times the processors that the same use while the caller sleeps: who has not come to rest, since the machine is busy,
uses as many."""

_THREAD_CLOCK, _PROCESS_CLOCK = 6, 2
"""Linux's numbers of the scheduled time of a thread and a process, beside the id (clock_getcpuclockid(3))."""


@dataclass(frozen=True)
class BackgroundWork:
    """What did not come to rest."""

    processors: float
    """That were used, on average."""
    names: tuple[str, ...]
    """Of the threads and processes, at most four."""

    worked_s: float = 0.0
    """For how long in all, since it was waited for."""

    dodged: bool = False
    """Whether it rested while it was looked at, and worked while the baseline was called."""

    @property
    def evidence(self) -> str:
        who = ", ".join(self.names) or "threads that end before they can be named"
        if self.dodged:
            return (
                f"{who} rested while the lab waited, and worked while the baseline was called, for "
                f"{1e3 * self.worked_s:.2g} ms of a processor"
            )
        return (
            f"{who} worked on for {self.worked_s:.2g} s of a processor while nothing was called, "
            f"on {self.processors:.1f} of them at last"
        )


def background_work(rest_s: float = REST_S, kin: Kin | None = None) -> BackgroundWork | None:
    """What goes on while this thread sleeps; None as soon as there is nothing, mostly at once, and where what goes on
    had little of the processors. ``kin``: the processes that are looked at beside this one."""
    kin = kin or Kin()
    began = time.monotonic()
    before = dict(_clocks(kin))
    while True:
        work = _probe(kin)
        if work is None:
            return None
        worked_s = sum(now - before.get(task, 0.0) for task, now in _clocks(kin))
        waited_s = time.monotonic() - began
        if waited_s > rest_s and worked_s > WORKED_S:
            return replace(work, worked_s=worked_s)
        if waited_s > max(rest_s, MOST_REST_S):
            return None


def work_beside(turn: Callable[[], object], kin: Kin | None = None) -> BackgroundWork | None:
    """What goes on while the calling thread works, and hardly while it sleeps: who knows a look by its frames, and
    rests for as long, does not know this one. None where in one of two attempts it works as little, or no more than
    asleep. For calls that work in the calling thread alone."""
    kin = kin or Kin()
    work = None
    for _ in range(2):
        asleep = _probe(kin)
        work = _beside(turn, kin)
        if work is None or (asleep is not None and work.processors < MORE_BESIDE * asleep.processors):
            return None
    return work


def _beside(turn: Callable[[], object], kin: Kin) -> BackgroundWork | None:
    before, began, own_s = dict(_clocks(kin)), time.perf_counter(), time.thread_time()
    for _ in range(_MOST_TURNS):
        turn()
        if time.thread_time() - own_s > BESIDE_S:
            break
    own_s, duration = time.thread_time() - own_s, time.perf_counter() - began
    used = {task: now - before.get(task, now) for task, now in _clocks(kin)}
    total = sum(used.values())
    if total < max(SHARE_BESIDE * own_s, LEAST_BESIDE_S):
        return None
    busy = sorted(used, key=lambda task: -used[task])
    names = tuple(_name(task, kin) for task in busy[:4] if used[task] > LEAST_BESIDE_S / 4)
    return BackgroundWork(total / duration, names, total, dodged=True)


def _probe(kin: Kin) -> BackgroundWork | None:
    before, began = dict(_clocks(kin)), time.perf_counter()
    ready: set[str] = set()
    for _ in range(LOOKS):
        time.sleep(LOOK_S)
        ready |= set(_ready(kin))
    duration = time.perf_counter() - began
    used = {task: (now - before.get(task, now)) / duration for task, now in _clocks(kin)}
    total = sum(used.values())
    if total < AT_REST and not ready:
        return None
    busy = dict.fromkeys([*ready, *(task for task in used if used[task] > AT_REST / 4)])
    return BackgroundWork(total, tuple(_name(task, kin) for task in list(busy)[:4]))


def _tasks(kin: Kin) -> Iterator[str]:
    """``pid/task/tid`` of all but this thread; nothing where Linux does not list them."""
    own = str(threading.get_native_id())
    for process in ("self", *map(str, kin.processes())):
        try:
            names = [each.name for each in Path(f"/proc/{process}/task").iterdir()]
        except OSError:  # it ended, or there is no /proc
            continue
        yield from (f"{process}/task/{name}" for name in names if process != "self" or name != own)


def _clocks(kin: Kin) -> Iterator[tuple[str, float]]:
    """Seconds that each thread of this process, and each child, ran. Of a thread that was not there before, the
    process's clock tells."""
    for task in _tasks(kin):
        process, _, number = task.split("/")
        own = process == "self"
        if not own and process != number:
            continue  # a child's clock has all of its threads
        clock = _THREAD_CLOCK if own else _PROCESS_CLOCK
        try:
            yield task, time.clock_gettime((~int(number) << 3) | clock)
        except OSError:
            continue


def _ready(kin: Kin) -> Iterator[str]:
    """Tasks that run or would if they had a processor."""
    for task in _tasks(kin):
        try:
            state = Path(f"/proc/{task}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if state == "R":
            yield task


def _name(task: str, kin: Kin) -> str:
    process, _, number = task.replace("/task/", "/").partition("/")
    kind = "thread" if process == "self" else "process"
    left = (
        ", which left the worker's tree of processes,"
        if process.isdigit() and int(process) in kin.left()
        else ""
    )
    try:
        return f"{kind} {Path(f'/proc/{task}/comm').read_text().strip()!r} ({number}){left}"
    except OSError:
        return f"{kind} {number}{left}"
