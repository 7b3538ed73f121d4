"""The worker's processes, all of which end with it: what a candidate starts may outlive neither worker nor lab.

A worker is killed by the kernel when its parent dies, even while it holds Python's lock or is stopped
(``PR_SET_PDEATHSIG``). What leaves its tree comes to its `keeper`, which takes in the processes below it whose parents
are gone (``PR_SET_CHILD_SUBREAPER``); prctl(2). Where the keeper is killed as well, they are told by a mark in the
environment that they began with. Elsewhere than on Linux there is only the process group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

MARK = "CUDADENT42_WORKER"
"""Variable in the environment of a worker and of what it starts; another value for each worker."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ROUNDS = 5
"""Of looking for more: a process may be started while the others are ended."""
_PROC = Path("/proc")


def tie_to_parent(parent: int) -> None:
    """It ends with ``parent``, the process that started it, and takes in orphans."""
    adopt_orphans()
    end_with_parent(parent)


def end_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """``by`` is sent to the caller when ``parent`` ends, which started it."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(by), *[ctypes.c_ulong(0)] * 3)
    if os.getppid() != parent:  # it was gone before it could be asked for
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Takes in the processes below this one whose parents are gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), *[ctypes.c_ulong(0)] * 3)


def end_all(worker: int, mark: str, *, runs: bool, spared: Collection[int] = ()) -> None:
    """Kill the worker and all that came from it, but ``spared``. ``runs``: it has not been waited for, so its number is
    its own."""
    if runs:
        with suppress(ProcessLookupError):  # it starts nothing any more, and goes on adopting
            os.kill(worker, signal.SIGSTOP)
    for _ in range(_ROUNDS):
        others = {*(_below(worker) if runs else ()), *_marked(mark, worker)}.difference(spared)
        for process in others:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if not others:
            break
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)


def end_below(process: int) -> None:
    """Kill all that is below it."""
    for _ in range(_ROUNDS):
        others = list(_below(process))
        for other in others:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(other, signal.SIGKILL)
        if not others:
            break


def _below(process: int) -> Iterator[int]:
    """Descendants that run."""
    parents: dict[int, list[int]] = {}
    for entry in _processes():
        with suppress(OSError, ValueError, IndexError):
            # pid (name, which may hold anything) state ppid ...; proc_pid_stat(5)
            state, parent = (
                (_PROC / str(entry) / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            )
            if state != "Z":
                parents.setdefault(int(parent), []).append(entry)
    waiting = list(parents.get(process, ()))
    while waiting:
        child = waiting.pop()
        yield child
        waiting += parents.get(child, ())


def _marked(mark: str, worker: int) -> Iterator[int]:
    wanted = f"{MARK}={mark}".encode()
    for entry in _processes():
        with suppress(OSError):
            if entry != worker and wanted in (_PROC / str(entry) / "environ").read_bytes().split(b"\0"):
                yield entry


def _processes() -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir(_PROC) if name.isdigit()]
    return []
