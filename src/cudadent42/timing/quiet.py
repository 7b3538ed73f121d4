"""Readings on a CPU during which the processors were there: of calls that have nothing beside them, and of parts of one
kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cudadent42.timing.contention import Window, waited_s

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """How long quiet readings are looked for."""

    most_for_one: int = 10
    """Readings that are taken for each one that is wanted; on a machine with one competitor for each of two processors
    about one in eight short ones is quiet."""
    most_s: float = 10.0
    fewest: int = 1
    """That are taken even if that takes longer."""


USUAL = Patience()


@dataclass(frozen=True)
class QuietReadings(Generic[T]):
    readings: tuple[T, ...]
    taken: int
    """With those that were disturbed."""

    def reason(self, noun: str = "readings") -> str:
        """Why there are too few of them."""
        return (
            f"other work took the processors away in {self.taken - len(self.readings)} of {self.taken} {noun}; "
            "repeat on a quiet machine"
        )


def quiet_readings(read: Callable[[], T], wanted: int, patience: Patience = USUAL) -> QuietReadings[T]:
    """``wanted`` readings during which no thread of this process waited for a processor, or fewer where they are not to
    be had. Where Linux does not tell, every reading counts."""
    quiet: list[T] = []
    taken = 0
    stop = time.perf_counter() + patience.most_s
    while len(quiet) < wanted and taken < patience.most_for_one * wanted:
        if taken >= patience.fewest and time.perf_counter() > stop:
            break
        began, before = time.perf_counter(), waited_s()
        reading = read()
        window = Window(time.perf_counter() - began, waited_s() - before)
        taken += 1
        if not window.disturbed:
            quiet.append(reading)
    return QuietReadings(tuple(quiet), taken)
