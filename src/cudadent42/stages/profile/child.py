"""Running a program that may start others, and ending all of them when it takes too long."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

_KILL_WAIT_S = 10.0


def run(
    arguments: Sequence[str],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Like ``subprocess.run``, in a process group of its own, which is ended whole on a time-out and on Ctrl-C: a
    profiler that is killed alone leaves the profiled program on the GPU.

    What is printed goes to ``output``, or is in the result. Raises OSError and ``subprocess.TimeoutExpired``.
    """
    process = subprocess.Popen(
        arguments,
        env=None if environment is None else dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if output is None else output,
        stderr=subprocess.PIPE if output is None else output,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=timeout_s)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # stuck inside a driver: nothing more can be done from here
            process.communicate(timeout=_KILL_WAIT_S)
        raise
    return subprocess.CompletedProcess(arguments, process.returncode, out or b"", error or b"")
