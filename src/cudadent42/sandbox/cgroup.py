"""A control group for a sandbox, where this user may make one: memory and processes of all together; cgroups(7)."""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

from cudadent42.sandbox.policy import Limits

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "cudadent42-"
_SETTLE_S, _LOOK_S = 20.0, 0.02


def make(limits: Limits) -> tuple[str, ...]:
    """Folders of new groups with these limits: one that has both (version 2), or one for each (version 1).

    Empty where none may be made.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ()
    name = f"{_PREFIX}{uuid.uuid4().hex[:12]}"
    made = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            own = _ROOT / path.lstrip("/")
            # A group with processes of its own cannot have children with limits, so a sister is made.
            made += _attempt([own / name, own.parent / name], _version_2(limits))
        elif controllers == "memory":
            bounds = {"memory.limit_in_bytes": limits.memory_bytes}
            made += _attempt([_ROOT / "memory" / path.lstrip("/") / name], bounds)
        elif controllers == "pids":
            made += _attempt([_ROOT / "pids" / path.lstrip("/") / name], {"pids.max": limits.processes})
    return tuple(made)


def _version_2(limits: Limits) -> dict[str, int]:
    return {"memory.max": limits.memory_bytes, "pids.max": limits.processes}


def _attempt(places: list[Path], bounds: dict[str, int]) -> list[str]:
    """The first of these folders that can be made with all its bounds."""
    for folder in places:
        if _ROOT not in folder.parents:
            continue
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            for file, bound in bounds.items():
                if not (folder / file).exists():  # it would be made, in a file system that is none of groups
                    raise FileNotFoundError(file)
                (folder / file).write_text(str(bound))
            return [str(folder)]
        except OSError:
            with suppress(OSError):
                folder.rmdir()
    return []


def join(folders: tuple[str, ...]) -> tuple[bool, bool]:
    """Move this process into the groups. Whether memory and processes are bounded. Raises OSError."""
    memory = processes = False
    for folder in folders:
        (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
        files = os.listdir(folder)
        memory |= "memory.max" in files or "memory.limit_in_bytes" in files
        processes |= "pids.max" in files
    return memory, processes


def settle(folders: tuple[str, ...]) -> None:
    """Wait until the groups' processes, which were killed, are gone: until then they count."""
    stop = time.monotonic() + _SETTLE_S
    while time.monotonic() < stop and any(map(_processes, folders)):
        time.sleep(_LOOK_S)


def _processes(folder: str) -> str:
    try:
        return Path(folder, "cgroup.procs").read_text()
    except OSError:
        return ""


def remove(folders: tuple[str, ...]) -> None:
    """Once their processes are gone."""
    settle(folders)
    for folder in folders:
        with suppress(OSError):
            os.rmdir(folder)
