"""Limits on memory, processes, files and their size: setrlimit(2), and who goes first when memory runs out."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

from cudadent42.sandbox.policy import Limits


def apply(limits: Limits) -> str:
    """Bounds this process and all that it starts; returns them in words. Raises OSError."""
    bounds = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_DATA: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: limits.open_files,
    }
    if limits.address_bytes is not None:
        bounds[resource.RLIMIT_AS] = limits.address_bytes
    for kind, bound in bounds.items():
        _lower(kind, bound)
    with suppress(OSError):  # the system's choice then: it is only about who is ended first
        Path("/proc/self/oom_score_adj").write_text("1000")
    return f"{limits.memory_bytes >> 20:,} MiB a process, files of {limits.file_bytes >> 20:,} MiB"


def limit_processes(limits: Limits) -> str:
    """Bounds the processes of this user, those that run already not counted; in words. Raises OSError where the system
    does not hold root to it."""
    if os.geteuid() == 0:
        raise OSError(0, "resource limits do not hold root's processes")
    _lower(resource.RLIMIT_NPROC, _running() + limits.processes)
    return f"{limits.processes:,}"


def _running() -> int:
    """Threads of this user."""
    count = 0
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.geteuid():
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _lower(kind: int, bound: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        bound = min(bound, hard)
    try:
        resource.setrlimit(kind, (bound, bound))
    except ValueError as error:
        raise OSError(0, str(error)) from error
