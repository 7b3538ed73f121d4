"""Whether processor time is a measure of a call: not of one that waits for what others do."""

from __future__ import annotations

from collections.abc import Callable

from cudadent42.model.implementations import UnsupportedCaseError
from cudadent42.timing.contention import waited_s
from cudadent42.timing.processor_time import MOST_IDLE, idle_share
from cudadent42.timing.timers import Reading

IDLE_WINDOW_S = 3e-3
"""Of calls that are looked at for idle time, so that what surrounds them does not matter."""

_MOST_IDLE_READINGS = 30
"""However little processor time a reading takes: it may be waiting."""


def processor_window_s(read: Callable[[], Reading]) -> float:
    """Processor time of one reading. Raises UnsupportedCaseError for code that waits for what others do: processor time
    is no measure of it."""
    reading = read()
    window_s = reading.latency_ms * reading.inner / 1e3
    readings = max(1, min(_MOST_IDLE_READINGS, round(IDLE_WINDOW_S / max(window_s, 1e-9))))
    idle = idle_share(lambda: [read() for _ in range(readings)], waited_s)
    if idle > MOST_IDLE:
        raise UnsupportedCaseError(
            f"for {idle:.0%} of its calls' time neither it nor its child processes run: it waits for others' work, "
            "which processor time does not count; use --timer call"
        )
    return window_s
