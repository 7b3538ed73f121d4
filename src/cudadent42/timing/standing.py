"""How the system runs a thread: its priority and class, the processors that it may use, how fast these are for it."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from contextlib import suppress
from dataclasses import dataclass

_GET_ATTRIBUTES = {"x86_64": 315, "aarch64": 275}
"""Of sched_getattr(2), by processor."""

_ATTRIBUTES = struct.Struct("IIQiIQQQII")
_ANY_SPEED = (0, 1024)
_MOST_GROUP_BYTES = 1 << 14
_BOUNDS_TIME = {"cpu", "cpuset", ""}
"""Controllers, of the old kind; the new kind's groups have no name."""

_call = ctypes.CDLL(None).syscall


@dataclass(frozen=True)
class Standing:
    """Of one thread."""

    niceness: int
    scheduling: int
    processors: frozenset[int]
    speed: tuple[int, int] = _ANY_SPEED
    """Between which shares of 1024 its load is taken to lie when a processor's clock is chosen."""
    groups: tuple[str, ...] = ()
    """The control groups that it is in, of those that may bound processor time; without those at the top."""

    def __str__(self) -> str:
        speed = "" if self.speed == _ANY_SPEED else f", clocks held to {self.speed} of 1024"
        processors = len(self.processors)
        groups = "".join(f", in control group {group}" for group in self.groups)
        return (
            f"niceness {self.niceness}, scheduling {self.scheduling}, "
            f"on {processors} processor{'s' if processors != 1 else ''}{speed}{groups}"
        )


def standings(process: int) -> dict[int, Standing]:
    """Of a process's threads, by number; empty where the system does not tell."""
    threads: dict[int, Standing] = {}
    with suppress(OSError):
        for thread in map(int, os.listdir(f"/proc/{process}/task")):
            with suppress(OSError):
                threads[thread] = standing(thread)
    return threads


def standing(thread: int) -> Standing:
    """Raises OSError where there is no such thread, and where the system does not tell."""
    return Standing(
        os.getpriority(os.PRIO_PROCESS, thread),
        os.sched_getscheduler(thread),
        frozenset(os.sched_getaffinity(thread)),
        _speed(thread),
        _groups(thread),
    )


def _groups(thread: int) -> tuple[str, ...]:
    """None where the system does not tell."""
    try:
        descriptor = os.open(f"/proc/{thread}/cgroup", os.O_RDONLY)
    except OSError:
        return ()
    try:
        lines = os.read(descriptor, _MOST_GROUP_BYTES).decode(errors="replace").splitlines()
    finally:
        os.close(descriptor)
    places = (line.split(":", 2)[1:] for line in lines if line.count(":") >= 2)
    return tuple(
        f"{names}:{path}" for names, path in places if _BOUNDS_TIME & {*names.split(",")} and path != "/"
    )


def _speed(thread: int) -> tuple[int, int]:
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    number = _GET_ATTRIBUTES.get(platform.machine())
    if number is None or _call(number, thread, buffer, _ATTRIBUTES.size, 0) != 0:
        return _ANY_SPEED
    size, *_, least, most = _ATTRIBUTES.unpack(buffer.raw)
    return (least, most) if size >= _ATTRIBUTES.size and most else _ANY_SPEED  # 0: the kernel holds nobody's
