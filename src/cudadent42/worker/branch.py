"""A process that is forked from a worker before it loads anything of a candidate, and outlives it.

Importing PyTorch takes seconds of processor time. A worker has done so when it begins, so whoever needs one more clean
process with PyTorch, as the audit does, takes a branch of the worker.

It is no descendant of the worker's: it is forked twice, and the one between ends at once. It ends when the other end of
its socket is closed, which the lab alone holds.
"""

from __future__ import annotations

import importlib
import os
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass

from cudadent42.worker.processes import adopt_orphans, end_all

_PID = struct.Struct("q")

START_TIMEOUT_S = 180.0
"""Longest time until the worker has imported PyTorch from a cold disk."""


@dataclass(frozen=True)
class Trunk:
    """What a branch does: ``module.preload(argument)`` runs in the worker, ``module.serve(socket)`` in the branch."""

    module: str
    argument: str


class Branch:
    """The lab's end. ``pid`` waits until there is a process. A context manager, which ends it.

    ``mark``: of the environment that it began with (`processes.MARK`). ``pid``: known already.
    """

    def __init__(self, requests: socket.socket, mark: str, pid: int = 0) -> None:
        self.requests = requests
        self._mark = mark
        self._pid = pid

    @property
    def pid(self) -> int:
        """Raises OSError where it did not start."""
        if not self._pid:
            self.requests.settimeout(START_TIMEOUT_S)
            data = self.requests.recv(_PID.size)
            if len(data) < _PID.size:
                raise ConnectionResetError("the worker ended before it had branched off")
            self._pid = _PID.unpack(data)[0]
        return self._pid

    def _runs(self) -> bool:
        """Whether its process is there, so that its number is its own."""
        try:
            self.requests.setblocking(False)
            return bool(self.requests.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """It ends, and all that it forked."""
        if self._pid:
            end_all(self._pid, self._mark, runs=self._runs())
        self._pid = 0
        self.requests.close()

    def __enter__(self) -> Branch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def branch_off(trunk: Trunk, descriptor: int) -> None:
    """Called by the worker, while it has one thread: returns in the worker only, with the socket closed."""
    module = importlib.import_module(trunk.module)
    module.preload(trunk.argument)
    between = os.fork()
    if between == 0:
        if os.fork() == 0:
            _serve(trunk, descriptor)
        os._exit(0)
    os.waitpid(between, 0)
    os.close(descriptor)


def _serve(trunk: Trunk, descriptor: int) -> None:
    """With nothing of the worker's but the socket: who waits for the worker's pipes must see them end with it."""
    try:
        os.setsid()
        adopt_orphans()
        sys.stdin.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
        requests = socket.socket(fileno=descriptor)
        requests.send(_PID.pack(os.getpid()))
        with suppress(OSError):  # the lab is gone
            importlib.import_module(trunk.module).serve(requests)
    finally:
        os._exit(0)
