"""Slurm: elements of a job array are workers that pull from the shared folder.

A configuration is never a job of its own: sites ask for few allocations, and an element keeps its GPU throughout.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cudadent42.base.errors import LabError, UsageError
from cudadent42.base.paths import real_path
from cudadent42.fleet.engine import Joined, Left, Message
from cudadent42.fleet.folder import FolderEngine

MOST_ELEMENTS = 1000
"""Of one array: below Slurm's usual ``MaxArraySize``, 1001. More workers are several arrays."""

_ASK_EVERY_S = 30.0
_MOST_UNANSWERED = 20
"""Questions to a Slurm that fails: ten minutes of them."""
_CALL_S = 60.0
_CLOSE_S = 10.0


@dataclass(frozen=True)
class Partition:
    name: str
    workers: int
    gpus: bool
    """Whether each has a GPU."""


class SlurmEngine(FolderEngine):
    """An `Engine`. The folder lies where this machine and the nodes see it under one path."""

    def __init__(
        self,
        root: Path,
        partition: Partition,
        *,
        ignore_preflight: bool = False,
        ask_every_s: float = _ASK_EVERY_S,
    ) -> None:
        """Submits the arrays. Raises UsageError where Slurm is not here or refuses."""
        super().__init__(root)
        self._ask_every_s = ask_every_s
        self._asked_s = time.monotonic()
        self._present = 0
        self._unanswered = 0
        logs = root / "workers"
        logs.mkdir(parents=True, exist_ok=True)
        self.jobs: list[str] = []
        left = partition.workers
        try:
            while left > 0:
                elements = min(left, MOST_ELEMENTS)
                self.jobs.append(self._submit(root, logs, partition, elements, ignore_preflight))
                left -= elements
        except UsageError:
            self.close()  # the arrays before it would wait for tasks
            raise

    def _submit(
        self, root: Path, logs: Path, partition: Partition, elements: int, ignore_preflight: bool
    ) -> str:
        command = [sys.executable, "-m", "cudadent42", "fleet", "work", str(real_path(root))]
        command += ["--device", "cuda" if partition.gpus else "cpu"]
        command += ["--ignore-preflight"] if ignore_preflight else []
        script = f"#!/bin/sh\nexec {shlex.join(command)}\n"
        options = ["--parsable", f"--array=0-{elements - 1}", f"--partition={partition.name}"]
        options += ["--job-name=cudadent42", f"--output={real_path(logs)}/slurm-%A_%a.log", "--requeue"]
        options += ["--gres=gpu:1"] if partition.gpus else []
        answer = _call("sbatch", *options, given=script)
        # The number, and behind a semicolon the cluster's name.
        job = answer.strip().partition(";")[0]
        if not job.isdigit():
            raise UsageError(f"sbatch answered {answer.strip()!r}; expected the number of a job")
        return job

    def wait(self, seconds: float) -> Sequence[Message]:
        messages = super().wait(seconds)
        self._present += sum(isinstance(message, Joined) for message in messages)
        self._present -= sum(isinstance(message, Left) for message in messages)
        now_s = time.monotonic()
        if self._present <= 0 and now_s - self._asked_s >= self._ask_every_s:
            self._asked_s = now_s
            if not self._are_known():
                raise LabError(
                    f"the Slurm jobs {', '.join(self.jobs)} have ended; their logs are in the folder `workers`, "
                    "and the same command goes on"
                )
        return messages

    def _are_known(self) -> bool:
        """Whether Slurm has the jobs still. Raises LabError where it gave no answer again and again."""
        try:
            listed = _call("squeue", "--noheader", "--jobs", ",".join(self.jobs), missing="")
        except UsageError as error:  # a controller that restarts, or has much to do
            self._unanswered += 1
            if self._unanswered >= _MOST_UNANSWERED:
                raise LabError(
                    f"squeue failed {self._unanswered} times one after the other while no worker was there, the last: "
                    f"{error}; the same command goes on"
                ) from error
            return True
        self._unanswered = 0
        return bool(listed.strip())

    def close(self) -> None:
        """Elements end by themselves after their tasks; those that wait, or take long, are cancelled."""
        super().close()
        until_s = time.monotonic() + _CLOSE_S
        while self.queue.workers() and time.monotonic() < until_s:
            time.sleep(0.1)
        if self.jobs:
            with suppress(
                UsageError
            ):  # whoever begins later sees that it is over; what was measured is not lost by it
                _call("scancel", *self.jobs, missing="")
            self.jobs = []


def _call(*command: str, given: str = "", missing: str | None = None) -> str:
    """What a command of Slurm's prints. Raises UsageError; ``missing`` is the answer instead, where it knows no such
    job any more."""
    try:
        done = subprocess.run(
            command,
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=_CALL_S,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no {command[0]} here; --fleet slurm needs a machine that submits jobs"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{command[0]} gave no answer for {_CALL_S:.0f} s") from error
    if done.returncode != 0:
        if missing is not None and "Invalid job id" in done.stderr:
            return missing
        raise UsageError(f"{command[0]} ended with exit code {done.returncode}: {done.stderr.strip()[:300]}")
    return done.stdout
