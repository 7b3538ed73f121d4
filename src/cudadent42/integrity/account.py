"""What the checks of a process cost: every run writes it down, so nobody has to believe a figure of another machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from cudadent42.model.integrity import Spent


class Account:
    """By check, seconds of processor time of this process and on the wall. What is inside another check counts once."""

    def __init__(self) -> None:
        self._spent: dict[str, Spent] = {}
        self._open = False

    @contextmanager
    def of(self, check: str) -> Iterator[None]:
        """Counts what is done inside."""
        if self._open:
            yield
            return
        self._open = True
        began_s, ran_s = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            ran_s, began_s = time.process_time() - ran_s, time.perf_counter() - began_s
            self._open = False
            self.add(check, Spent(ran_s, began_s))

    def processor_s(self, *checks: str) -> float:
        """Of these until now."""
        return sum(self._spent[check].processor_s for check in checks if check in self._spent)

    def add(self, check: str, spent: Spent) -> None:
        self._spent[check] = self._spent.get(check, Spent()) + spent

    def settled(self) -> dict[str, Spent]:
        """All of it; the account is empty after it."""
        spent, self._spent = self._spent, {}
        return spent
