"""Copies of a run that goes on, from a machine that may be taken away at any moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cudadent42.base.errors import LabError
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core.job import Workspace

COPY_EVERY_S = 60.0
"""Of measuring that may be lost. One copy is a tar of a few megabytes, through the connection that there is."""


@contextmanager
def copying(workspace: Workspace, job: str, target: Path, every_s: float | None) -> Iterator[None]:
    """While it is open, ``target`` is made a copy of the job's folder every ``every_s`` seconds; never for None."""
    if every_s is None:
        yield
        return
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(every_s):
            with suppress(LabError, OSError):  # the next one, or whoever follows the job, will tell
                jobs.copy(workspace, job, target)

    thread = threading.Thread(target=work, name="copies of a run", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
