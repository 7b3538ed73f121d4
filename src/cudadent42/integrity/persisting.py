"""The part of a GPU's L2 that is set aside for data that persists: what lies there survives the flush of the cache.

llm.c's pull request 851 shows 3,530 GB/s on a card of 864 GB/s that way.
"""

from __future__ import annotations

import ctypes

from flashmoe_science.cuda.driver import check, library, make_context_current
from flashmoe_science.errors import DeviceError

_LIMIT = 6
"""CU_LIMIT_PERSISTING_L2_CACHE_SIZE."""


class PersistingCache:
    """Of the current context. Raises DeviceError where there is none."""

    def __init__(self) -> None:
        self._cuda = library()

    def reset(self) -> None:
        """Nothing persists any more, and nothing is set aside."""
        check(self._cuda, self._cuda.cuCtxResetPersistingL2Cache(), "cuCtxResetPersistingL2Cache")
        check(self._cuda, self._cuda.cuCtxSetLimit(_LIMIT, ctypes.c_size_t(0)), "cuCtxSetLimit")

    @property
    def set_aside_bytes(self) -> int:
        size = ctypes.c_size_t()
        check(self._cuda, self._cuda.cuCtxGetLimit(ctypes.byref(size), _LIMIT), "cuCtxGetLimit")
        return size.value


def persisting_cache(device: str) -> PersistingCache | None:
    """None for the CPU, and for a GPU that sets nothing aside (before sm_80)."""
    if not device.startswith("cuda"):
        return None
    make_context_current(int(device.partition(":")[2] or 0))
    cache = PersistingCache()
    try:
        cache.reset()
    except DeviceError:
        return None
    return cache
