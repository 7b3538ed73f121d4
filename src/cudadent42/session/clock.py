"""When something happened, by two clocks: the time of day, which can jump, and the time since the machine started,
which cannot, but means nothing on another machine or after a restart."""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

JUMP_S = 30.0
"""The two clocks may drift apart by so much between two events before one of them is said to have jumped."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Instant:
    time: str
    """UTC, ISO 8601."""
    uptime_s: float
    """Since the machine started, time asleep included."""
    boot: str
    """Identity of the machine's start."""
    host: str

    @property
    def wall_s(self) -> float:
        return datetime.fromisoformat(self.time).timestamp()

    def same_stint(self, other: Instant) -> bool:
        """Whether the machine ran from one to the other without a restart."""
        return (self.host, self.boot) == (other.host, other.boot)


Clock = Callable[[], Instant]


@dataclass(frozen=True)
class Interval:
    """From one instant to a later one."""

    seconds: float
    """That the machine was on for; 0 across a restart, when the meter stood still."""
    away_s: float
    """Between a stop and the next start, by the time of day; 0 within one stint."""
    jump_s: float
    """By how much the time of day moved more than time did; 0 where it did not jump, or nobody can tell."""


def between(earlier: Instant, later: Instant) -> Interval:
    """How much time passed, trusting the clock that cannot jump wherever it means something."""
    wall = later.wall_s - earlier.wall_s
    if not earlier.same_stint(later):
        return Interval(0.0, max(0.0, wall), min(0.0, wall))
    passed = max(0.0, later.uptime_s - earlier.uptime_s)
    jump = wall - passed
    return Interval(passed, 0.0, jump if abs(jump) > JUMP_S else 0.0)


def now() -> Instant:
    return Instant(
        time=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        uptime_s=round(time.clock_gettime(_uptime_clock()), 3),
        boot=boot_id(),
        host=platform.node(),
    )


@functools.cache
def boot_id() -> str:
    """Of this start of the machine; empty where the system does not tell."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _uptime_clock() -> int:
    return getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
