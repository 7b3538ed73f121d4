"""The process that the contestants are forked from: a branch of the run's worker, where there is one, else
``python -m cudadent42.audit.nursery SOCKET PARENT OPERATION [POLICY]``.

It has imported PyTorch and what the lab needs, which takes seconds. It neither runs an operation of PyTorch's nor loads
anything of a candidate, so each contestant begins at once, and as clean as a process of its own. With the policy of a
sandbox each confines itself, apart from the other, before it loads anything.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import struct
import sys

from cudadent42.base.interpreter import add_folder
from cudadent42.model.implementations import OUR_PACKAGE, import_our_functions
from cudadent42.operations import definition
from cudadent42.sandbox.enter import enter
from cudadent42.sandbox.policy import Policy
from cudadent42.worker.branch import Trunk
from cudadent42.worker.processes import tie_to_parent

PIPES = 3
"""File descriptors ahead of those of the shared memories: requests, answers, the log."""

MOST_FILES = PIPES + 3

_PID = struct.Struct("q")


def trunk(operation: str, *, kernels: bool = False) -> Trunk:
    """Of a worker that is to branch off a nursery. ``kernels``: whether the run calls this project's own. The worker
    imports them in any case then, and what it has imported when it branches off no contestant has to import again."""
    return Trunk("cudadent42.audit.nursery", f"{operation} {OUR_PACKAGE}" if kernels else operation)


def fork(nursery: socket.socket, files: list[int]) -> int:
    """Asked of the nursery by its parent: the process id of a new contestant. Raises EOFError where it is gone."""
    socket.send_fds(nursery, [b"\0"], files)
    reply = nursery.recv(_PID.size)
    if len(reply) < _PID.size:
        raise EOFError("the audit's processes did not start")
    pid: int = _PID.unpack(reply)[0]
    return pid


def preload(argument: str) -> None:
    """What every contestant needs. ``argument``: `Trunk.argument`, or an operation."""
    operation, *packages = argument.split()
    importlib.import_module("cudadent42.audit.contestant")
    importlib.import_module(OUR_PACKAGE)
    if OUR_PACKAGE in packages:
        import_our_functions()
    definition(operation).numerics()
    definition(operation).implementations()


def serve(requests: socket.socket, policy: Policy | None = None) -> None:
    """Forks a contestant at each request, until the socket's other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for contestants: they are killed
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1, MOST_FILES)
        if not message:
            return
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            os.setsid()
            tie_to_parent(own)
            _contest(files, policy)
        for file in files:
            os.close(file)
        requests.send(_PID.pack(pid))


def _contest(files: list[int], policy: Policy | None) -> None:
    contestant = importlib.import_module("cudadent42.audit.contestant")
    try:
        for standard in (1, 2):
            os.dup2(files[2], standard)
        if policy is not None:
            enter(policy)
        add_folder(policy.folder if policy is not None else None)
        contestant.serve(files[0], files[1], files[PIPES:])
    finally:
        os._exit(0)


if __name__ == "__main__":
    tie_to_parent(int(sys.argv[2]))
    preload(sys.argv[3])
    given = Policy.from_json(sys.argv[4]) if len(sys.argv) > 4 else None
    serve(socket.socket(fileno=int(sys.argv[1])), given)
