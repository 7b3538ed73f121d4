"""Host time of a call, as the scripts beside this one measure it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

BATCHES = 30


def per_call(call: Callable[[], object], calls: int = 300, *, device: str = "cuda") -> float:
    """Microseconds per call, the least of 30 batches of ``calls``, few enough not to fill the launch queue."""
    best = math.inf
    for _ in range(BATCHES):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6
