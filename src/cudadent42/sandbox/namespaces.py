"""Namespaces: unshare(2). A user namespace first, which makes the others possible without being root."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from cudadent42.base.ending import end_as
from cudadent42.model.sandbox import Layer, LayerState
from cudadent42.sandbox.privileges import end_with_parent
from cudadent42.sandbox.syscalls import function, why

MOUNT, USER, PID, NET, IPC = 0x20000, 0x10000000, 0x20000000, 0x40000000, 0x08000000

_STANDARD_ERROR = 2
_LOOK_S = 0.1
"""How often processes are counted where nothing else limits them."""


def unshare(flag: int) -> None:
    function("unshare", flag)


def own_user() -> None:
    """A user namespace in which this user has the same number, and all rights over the namespaces to come.

    Outside, it has only those of the user, and none over processes that are not below it. Raises OSError.
    """
    user, group = os.geteuid(), os.getegid()
    unshare(USER)
    with suppress(FileNotFoundError):  # before Linux 3.19
        Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def tried(layer: Layer, attempt: Callable[[], object]) -> LayerState:
    """A layer, by trying it. What the attempt returns is its detail."""
    try:
        detail = attempt()
    except OSError as error:
        return LayerState(layer, False, why(error))
    return LayerState(layer, True, "" if detail is None else str(detail))


def can(attempt: Callable[[], object]) -> str:
    """Tries something in a process of its own that ends with it. Empty where it can be done, else why not."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            attempt()
        except OSError as error:
            os.write(write, why(error).encode())
        except BaseException as error:  # noqa: BLE001 - the copy of this process must not go on
            os.write(write, repr(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        text = answer.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    return text or ("" if status == 0 else f"the attempt died ({status})")


def become_first(watch_processes: int | None, confine: Callable[[], None]) -> None:
    """Go on as a process of a new process namespace; `PID` is unshared already.

    Three processes come of one. The outer one waits and ends as the innermost did. The next is the namespace's first:
    when it ends, all end. It calls ``confine``, starts the third and takes in orphans. Given ``watch_processes``, it
    ends all when there are more. Only the third returns from here.
    """
    alive, held = os.pipe()
    ended, tell = os.pipe()
    first = os.fork()
    if first:
        _wait_outside(first, ended, keep=(held, ended))
    os.close(held)
    end_with_parent()
    if _is_closed(alive):  # it died before it could be asked for
        os._exit(1)
    os.close(ended)
    confine()
    worker = os.fork()
    if worker:
        _wait_inside(worker, tell, watch_processes)
    for descriptor in (alive, tell):
        os.close(descriptor)
    end_with_parent()
    if os.getppid() != 1:
        os._exit(1)


def _wait_outside(first: int, ended: int, keep: tuple[int, ...]) -> NoReturn:
    """As the process that the parent knows: it ends as the worker inside did."""
    _close_all_but(keep)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, status = os.waitpid(first, 0)
    with suppress(OSError, ValueError):
        os.set_blocking(ended, False)
        status = int(os.read(ended, 32))
    end_as(status)


def _wait_inside(worker: int, tell: int, watch_processes: int | None) -> NoReturn:
    """As the first process of the namespace."""
    _close_all_but((tell,))
    while True:
        child, status = os.waitpid(-1, 0 if watch_processes is None else os.WNOHANG)
        if child == worker:
            os.write(tell, str(status).encode())
            os._exit(0)
        if watch_processes is not None and child == 0:
            if _threads() > watch_processes:
                os.write(tell, str(int(signal.SIGKILL)).encode())
                os._exit(0)  # the kernel ends all others with the first
            time.sleep(_LOOK_S)


def _threads() -> int:
    """In this namespace, by its own /proc."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _is_closed(pipe: int) -> bool:
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:
        return False


def _close_all_but(kept: tuple[int, ...]) -> None:
    """And the standard ones. What was handed on is the worker's, and that it is closed has to be seen."""
    first = _STANDARD_ERROR + 1
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
