"""What keeps a call's inputs out of the last-level cache, for measurements that ask for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from cudadent42.model.cases import Case
from cudadent42.model.records import CacheState, Plan

Flush = Callable[[], None]

FLUSH_FACTOR = 2
"""A buffer of twice the cache: replacement is not strictly least-recently-used."""

INPUT_SETS = 3
"""Input sets that calls rotate over, each with addresses of its own; their values are new at each visit."""

ROTATION_FACTOR = 3
"""Sets of a rotated cache take so many times its size: a set is gone before its turn comes again, though replacement is
not strictly least-recently-used."""

MOST_SETS = 48
"""Of them: a window has tens of calls, and each set is filled anew at each visit."""

DEFAULT_CACHE_BYTES = 64 << 20
"""Where the system does not say."""


def flush_for(plan: Plan) -> Flush | None:
    """Writes over a buffer of twice the cache; None where the plan does not ask for a cold cache."""
    if plan.cache is not CacheState.COLD:
        return None
    size = FLUSH_FACTOR * cache_bytes(plan.device)
    buffer = torch.empty(size // 4, dtype=torch.int32, device=plan.device)

    def flush() -> None:
        buffer.zero_()

    return flush


def input_sets(plan: Plan, case: Case) -> int:
    """How many sets of inputs calls rotate over, by what a call reads of one: of a long cache with a window little.

    Sets that share an input, as experts share weights, leave it in the cache however many there are; and so do
    `MOST_SETS` of which a call reads very little.
    """
    if plan.cache is not CacheState.ROTATED:
        return INPUT_SETS
    each = max(1, min(case.bytes_min, case.memory_bytes(2) - case.memory_bytes(1)))
    wanted = -(-ROTATION_FACTOR * cache_bytes(plan.device) // each)
    return min(MOST_SETS, max(INPUT_SETS, wanted))


def cache_bytes(device: str) -> int:
    """Size of the last-level cache: L2 of the GPU, or what Linux reports for the first processor."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [
        int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if (text := path.read_text().strip())[-1:] in ("K", "M")
    ]
    return max(sizes, default=DEFAULT_CACHE_BYTES)
