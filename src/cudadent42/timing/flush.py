"""Emptying the last-level cache before a window opens, for measurements that ask for a cold cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from cudadent42.model.records import CacheState, Plan

Flush = Callable[[], None]

FLUSH_FACTOR = 2
"""A buffer of twice the cache: replacement is not strictly least-recently-used."""

DEFAULT_CACHE_BYTES = 64 << 20
"""Where the system does not say."""


def flush_for(plan: Plan) -> Flush | None:
    """Writes over a buffer of twice the cache; None where the plan asks for a warm cache."""
    if plan.cache is CacheState.WARM:
        return None
    size = FLUSH_FACTOR * cache_bytes(plan.device)
    buffer = torch.empty(size // 4, dtype=torch.int32, device=plan.device)

    def flush() -> None:
        buffer.zero_()

    return flush


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
