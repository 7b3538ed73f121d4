"""A tuning's journal whose process is killed at one of its writes."""

from __future__ import annotations

import os
import random
from pathlib import Path

from cudadent42.tune import journal as events
from cudadent42.tune.journal import FILES, Setup, TuningJournal


class Killed(BaseException):
    """Stands for a kill: nothing of the process goes on behind it."""


class Dying(TuningJournal):
    """A journal whose process is killed behind, before or within a write."""

    def __init__(self, folder: Path, about: Setup, chance: random.Random, writes: int) -> None:
        super().__init__(folder, about)
        self._path = folder / FILES.entries
        self._chance = chance
        self._writes = writes

    def append(self, event: events.Event) -> events.Entry:
        self._writes -= 1
        if self._writes:
            return super().append(event)
        way = self._chance.choice(["before", "within", "behind"])
        if way != "before":
            super().append(event)
        if way == "within":
            data = self._path.read_bytes()
            last = data[: data[:-1].rfind(b"\n") + 1]
            torn = data[len(last) :]
            # Lines are as long as the digits of their times: what is drawn must not depend on that.
            os.truncate(self._path, len(last) + int(self._chance.random() * len(torn)))
        raise Killed
