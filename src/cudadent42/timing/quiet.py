"""Readings on a CPU during which the processors were there: a single call's time, where no second one is beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cudadent42.timing.contention import WAIT_LIMIT, waited_s
from cudadent42.timing.timers import Reading

MOST_FOR_ONE = 10
"""Readings that are taken for each one that is wanted; on a machine with one competitor for each of two processors
about one in eight short ones is quiet."""

MOST_S = 10.0
"""That looking for them may take."""


@dataclass(frozen=True)
class QuietReadings:
    readings: tuple[Reading, ...]
    taken: int
    """With those that were disturbed."""

    @property
    def reason(self) -> str:
        """Why there are too few of them."""
        return (
            f"other work took the processors away in {self.taken - len(self.readings)} of {self.taken} readings; "
            "repeat on a quiet machine"
        )


def quiet_readings(read: Callable[[], Reading], wanted: int) -> QuietReadings:
    """``wanted`` readings during which no thread of this process waited for a processor, or fewer where they are not to
    be had. Where Linux does not tell, every reading counts."""
    readings: list[Reading] = []
    taken = 0
    stop = time.perf_counter() + MOST_S
    while (
        len(readings) < wanted and taken < MOST_FOR_ONE * wanted and (not taken or time.perf_counter() < stop)
    ):
        began, before = time.perf_counter(), waited_s()
        reading = read()
        duration, waited = time.perf_counter() - began, waited_s() - before
        taken += 1
        if not waited > WAIT_LIMIT * duration:
            readings.append(reading)
    return QuietReadings(tuple(readings), taken)
