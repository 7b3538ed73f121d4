"""Timers that go off when a test says that time has passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Timers:
    """Stands in for ``threading.Timer``."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._waiting: list[_Timer] = []

    def __call__(self, interval: float, function: Callable[..., object], args: tuple[Any, ...]) -> _Timer:
        return _Timer(self._waiting, self._now_s + interval, lambda: function(*args))

    def pass_s(self, seconds: float) -> None:
        self._now_s += seconds
        for timer in [each for each in self._waiting if each.due_s <= self._now_s]:
            timer.cancel()
            timer.function()


class _Timer:
    daemon = False

    def __init__(self, waiting: list[_Timer], due_s: float, function: Callable[[], object]) -> None:
        self.due_s = due_s
        self.function = function
        self._waiting = waiting

    def start(self) -> None:
        self._waiting.append(self)

    def cancel(self) -> None:
        if self in self._waiting:
            self._waiting.remove(self)
