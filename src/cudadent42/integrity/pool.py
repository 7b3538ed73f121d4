"""The threads on which PyTorch runs its own operations: who puts them last slows the baseline, and nobody else.

Which ones they are no name says: a task is PyTorch's if it runs whenever one of PyTorch's operations does.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

import torch

from cudadent42.timing.standing import Standing, standing, standings

_GRAIN = 1 << 15
"""Entries of which PyTorch gives each thread at least so many (``at::internal::GRAIN_SIZE``)."""

_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which the user gives each thread processors of its own."""

_THREAD_CLOCK = 6

_ROUNDS = 5
"""Operations in each of which a thread has to work before it is held to be PyTorch's. All of PyTorch's have a part of
each; a thread that is just beginning, or wakes now and then, runs beside one or two of them."""


class Pool:
    """To be made before anything of a candidate is loaded: the threads begin, and how the caller's is run is how all
    have to be."""

    def __init__(self) -> None:
        self._expected: Standing | None = None
        self._bound = any(os.environ.get(name) for name in _BINDING)
        threads = torch.get_num_threads()
        self._values = torch.zeros(_GRAIN * threads if threads > 1 else 0, dtype=torch.float32, device="cpu")
        with suppress(AttributeError, OSError):  # elsewhere than on Linux
            self._expected = standing(threading.get_native_id())
        self._work()

    def disturbed(self) -> str:
        """Which of its threads are run in another way, and in which; empty for none, and where there is one thread."""
        if not len(self._values) or self._expected is None:
            return ""
        pool = self._that_work()
        others = self._run_otherwise(pool)
        for _ in range(_ROUNDS - 1):
            if not others:
                return ""
            pool &= self._that_work()
            others = self._run_otherwise(pool)
        if not others:
            return ""
        shown = "; ".join(f"{thread} with {now}" for thread, now in list(others.items())[:2])
        return (
            f"{len(others)} of PyTorch's {len(pool)} threads are not run as the process was, "
            f"with {self._expected}: {shown}"
        )

    def _work(self) -> None:
        self._values.add_(1.0)

    def _that_work(self) -> set[int]:
        """The threads that run while one operation does."""
        before = _clocks()
        self._work()
        return {thread for thread, now in _clocks().items() if now > before.get(thread, 0)}

    def _run_otherwise(self, pool: set[int]) -> dict[int, Standing]:
        all_standings = standings(os.getpid())
        return {
            thread: all_standings[thread]
            for thread in sorted(pool & all_standings.keys())
            if not self._is_as_expected(all_standings[thread])
        }

    def _is_as_expected(self, now: Standing) -> bool:
        expected = self._expected
        assert expected is not None
        alike = (now.niceness, now.scheduling, now.speed) == (
            expected.niceness,
            expected.scheduling,
            expected.speed,
        )
        return alike and (self._bound or now.processors == expected.processors)


def _clocks() -> dict[int, int]:
    """Nanoseconds that each thread of this process ran."""
    clocks: dict[int, int] = {}
    with suppress(OSError):
        for thread in map(int, os.listdir("/proc/self/task")):
            with suppress(OSError):
                clocks[thread] = time.clock_gettime_ns((~thread << 3) | _THREAD_CLOCK)
    return clocks
