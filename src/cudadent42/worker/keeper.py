"""The process between the lab and its worker: whoever leaves the worker's tree comes to it, and ends with it.

A process whose parent is gone goes to the nearest one above it that takes in orphans (``PR_SET_CHILD_SUBREAPER``).
What a candidate does to its own process can change nothing about those above, so a daemon by double fork, in a session
and with an environment of its own, is the keeper's child, and so is what was cloned as a sibling of the worker's. Only
a service of the system's, which ran before, is below somebody else.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from cudadent42.base.ending import end_as
from cudadent42.worker.processes import adopt_orphans, end_below, end_with_parent

_STANDARD_ERROR = 2


_AWAITED = (signal.SIGTERM, signal.SIGCHLD)
"""Blocked, and waited for: a handler could come just ahead of a wait that nothing else would end."""


def go_below_keeper() -> int | None:
    """Goes on as a child of this process, which stays behind as the keeper: its process id; None elsewhere than on
    Linux, where no process takes in orphans. For a process that has one thread."""
    if sys.platform != "linux":
        return None
    keeper = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    # Ahead of the fork, for the worker may run, and end, before the keeper does. Who ignores it, which is inherited,
    # waits for no child and counts none; and to end that discards one that has come.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    adopt_orphans()  # of the keeper alone: a fork does not take it on
    worker = os.fork()
    if worker:
        _keep(worker)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    end_with_parent(keeper)
    return keeper


def _keep(worker: int) -> NoReturn:
    """Ends as the worker does; after it nothing is left that came of it."""
    status = int(signal.SIGKILL)
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker's own is enough
        os.close(sys.stdin.fileno())
        os.closerange(_STANDARD_ERROR + 1, os.sysconf("SC_OPEN_MAX"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ended = None
        while ended is None and signal.sigwait(_AWAITED) == signal.SIGCHLD:
            ended = _ended(worker)
        status = status if ended is None else ended
        with suppress(ChildProcessError):  # waited for, so that what they took counts as the lab's
            while True:
                end_below(os.getpid())
                os.wait()
    finally:
        end_as(status)


def _ended(worker: int) -> int | None:
    """Its status if it has ended. All others that have are orphans."""
    with suppress(ChildProcessError):
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            if result[0] == worker:
                return result[1]
    return None
