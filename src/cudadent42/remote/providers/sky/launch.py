"""SkyPilot's launch: it brings a machine up, gives it the task, and lasts as long as the run."""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cudadent42.base.shown import plain
from cudadent42.remote.providers.sky.cluster import find_sky
from cudadent42.remote.providers.sky.spec import Spec
from cudadent42.remote.providers.sky.task import arrival

_TAIL_LINES = 30
_REASONS = (
    (
        (
            "No cloud access is set up",
            "No cloud is enabled",
            "which is not enabled",
            "Cloud access not set up",
        ),
        "SkyPilot may use no cloud that has it; give it access, and look with: sky check",
    ),
    (
        ("Catalog does not contain any instances", "No launchable resource found", "No resource satisfying"),
        "no cloud offers such a machine; change `resources`, after: sky gpus list --all",
    ),
    (
        ("VcpuLimitExceeded", "QUOTA_EXCEEDED", "QuotaExceeded", "Quota '", "quota exceeded"),
        "the cloud's quota for it is used up; ask the provider for more, or name another `infra`",
    ),
    (
        ("Failed to provision all possible launchable resources", "Failed to acquire resources"),
        "no place had one free; leave out `infra` or name another, or try again later",
    ),
    (
        ("Preflight failed",),
        "the machine came up, but preflight failed there, for the reasons above",
    ),
)
"""What SkyPilot says, and what to do about it; the first that matches."""


@dataclass(frozen=True)
class Launched:
    exit_code: int
    """0 where the run passed, 100 where it failed (``JobExitCode`` in ``sky/exceptions.py`` of 0.14.1), others where it
    did not come to a run, or where the log could not be followed to its end. Below 0 where a signal ended SkyPilot."""
    said: str
    """Its last lines."""
    arrived: bool
    """The machine has begun with the task."""

    @property
    def reason(self) -> str:
        """Why nothing ran, where nothing did."""
        for words, meaning in _REASONS:
            if any(word in self.said for word in words):
                return meaning
        last = " ".join(plain(self.said).split())[-300:]
        return f"sky launch ended with exit code {self.exit_code}: {last}"


def launch(
    spec: Spec, task: Path, job: str, on_arrival: Callable[[], None], on_output: Callable[[bytes], None]
) -> Launched:
    """Launch ``task``, whose run is ``job``; ``on_arrival`` is called when the machine begins with it.

    The limit counts jobs alone: left to itself, SkyPilot takes a terminal that somebody forgot there for work.
    Raises MachineNotReadyError where there is no SkyPilot.
    """
    process = subprocess.Popen(
        [
            find_sky(),
            "launch",
            f"--cluster={spec.cluster}",
            "--yes",
            f"--idle-minutes-to-autostop={spec.idle_minutes}",
            "--wait-for=jobs",
            "--down",
            str(task),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    mark = arrival(job).encode()
    arrived = False
    tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
    for line in process.stdout:
        tail.append(line)
        if not arrived and mark in line:
            arrived = True
            on_arrival()
        on_output(line)
    return Launched(process.wait(), b"".join(tail).decode(errors="replace"), arrived)
