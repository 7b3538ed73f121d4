"""Running a program that may start others, and ending all of them when it takes too long."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress

from cudadent42.base.output import LOOK_S, OutputLog

_KILL_WAIT_S = 10.0


def run(
    arguments: Sequence[str],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    output: OutputLog | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Like ``subprocess.run``, in a process group of its own, which is ended whole on a time-out and on Ctrl-C: a
    profiler that is killed alone leaves the profiled program on the GPU.

    What is printed goes to ``output``, or is in the result; no more than a log may hold, as candidates print there.
    Raises OSError and ``subprocess.TimeoutExpired``.
    """
    with _logs(output) as logs:
        process = subprocess.Popen(
            arguments,
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=logs[0].file,
            stderr=logs[1].file,
            start_new_session=True,
        )
        try:
            _wait(process, logs, timeout_s)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # Stuck inside a driver: nothing more can be done from here.
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_WAIT_S)
            raise
        out, error = (b"", b"") if output is not None else (log.content() for log in logs)
    return subprocess.CompletedProcess(arguments, process.returncode, out, error)


@contextmanager
def _logs(output: OutputLog | None) -> Iterator[tuple[OutputLog, OutputLog]]:
    """Of standard output and standard error."""
    if output is not None:
        yield output, output
        output.limit()
        return
    with closing(OutputLog(None)) as out, closing(OutputLog(None)) as error:
        yield out, error


def _wait(process: subprocess.Popen[bytes], logs: tuple[OutputLog, OutputLog], timeout_s: float) -> None:
    """Raises ``subprocess.TimeoutExpired``."""
    stop_s = time.monotonic() + timeout_s
    while True:
        try:
            process.wait(min(LOOK_S, max(0.0, stop_s - time.monotonic())))
            return
        except subprocess.TimeoutExpired:
            for log in logs:
                log.limit()
            if time.monotonic() >= stop_s:
                raise subprocess.TimeoutExpired(process.args, timeout_s) from None
