"""Processes of this machine: one for each GPU, or for each of several sets of a CPU's cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cudadent42.base.errors import LabError, UsageError
from cudadent42.fleet.engine import Message
from cudadent42.fleet.folder import FolderEngine
from cudadent42.fleet.task import plain_name

_STARTS = 3
"""Of a device's process, one after the other, before it is given up."""

_CLOSE_S = 5.0


@dataclass(frozen=True)
class Slot:
    """Where one worker works."""

    device: str
    cores: tuple[int, ...] = ()
    """That it is pinned to; all where empty."""

    @property
    def part(self) -> str:
        return f"cores{self.cores[0]}-{self.cores[-1]}" if self.cores else ""


def slots(device: str, count: int | None, asked: str) -> tuple[Slot, ...]:
    """So many devices of this machine, all GPUs if None. Raises UsageError where there are not.

    asked: the option that the caller was given, with its value, for that error.
    """
    if device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        count = count or 1
        if count > len(cores):
            raise UsageError(f"{asked}: expected no more workers than cores; this machine has {len(cores)}")
        size = len(cores) // count
        return tuple(Slot("cpu", tuple(cores[at * size : (at + 1) * size])) for at in range(count))
    import torch

    names = [torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count())]
    wanted = "GPUs" if count is None else "a GPU" if count == 1 else f"{count} GPUs"
    count = count or len(names)
    if not names or len(names) < count or len(set(names[:count])) > 1:
        kind = " of one kind" if count != 1 else ""
        raise UsageError(f"{asked}: expected {wanted}{kind}; this machine has {', '.join(names) or 'none'}")
    return tuple(Slot(f"cuda:{index}") for index in range(count))


class LocalEngine(FolderEngine):
    """An `Engine`."""

    def __init__(
        self, root: Path, devices: Sequence[Slot], *, ignore_preflight: bool = False, races: bool = False
    ) -> None:
        """``races``: whether workers are to get ready for races while they look at the machine."""
        super().__init__(root)
        self._root = root
        self._ignore_preflight = ignore_preflight
        self._races = races
        self._starts = dict.fromkeys(devices, 0)
        self._names: dict[Slot, str] = {}
        self._processes = {slot: self._start(slot) for slot in devices}

    @property
    def processes(self) -> tuple[int, ...]:
        """By number, of those that run."""
        return tuple(each.pid for each in self._processes.values() if each.poll() is None)

    def wait(self, seconds: float) -> Sequence[Message]:
        for slot, process in self._processes.items():
            if process.poll() is None:
                continue
            self.queue.forget(self._names[slot])
            if self._starts[slot] < _STARTS:
                self._processes[slot] = self._start(slot)
        if all(process.poll() is not None for process in self._processes.values()):
            raise LabError(
                f"the workers of this machine ended {_STARTS} times each; see the logs in {self._root / 'workers'}"
            )
        return super().wait(seconds)

    def close(self) -> None:
        super().close()
        until_s = time.monotonic() + _CLOSE_S
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until_s - time.monotonic()))
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # it ends its own processes
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_CLOSE_S)
            if process.poll() is None:
                process.kill()
                process.wait()

    def _start(self, slot: Slot) -> subprocess.Popen[bytes]:
        self._starts[slot] += 1
        logs = self._root / "workers"
        logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "cudadent42", "fleet", "work", str(self._root)]
        label = slot.device.replace(":", "-") + (f"-{slot.part}" if slot.part else "")
        self._names[slot] = plain_name(f"{label}-{os.getpid()}-{self._starts[slot]}")
        command += ["--device", slot.device, "--parent", str(os.getpid()), "--name", self._names[slot]]
        command += ["--ignore-preflight"] if self._ignore_preflight else []
        command += ["--races"] if self._races else []
        environment = dict(os.environ)
        if slot.cores:
            command += ["--cores", ",".join(map(str, slot.cores))]
            environment["OMP_NUM_THREADS"] = str(len(slot.cores))
        with (logs / f"{label}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
