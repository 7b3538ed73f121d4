"""Counters from which the persistent Hopper kernel draws its tiles.

A launch needs a counter of its own while it runs, finds it at zero and leaves it at zero. Launches on one stream run
one after another and share one; a launch captured in a CUDA graph, which may be replayed on any stream, keeps
one for itself.
"""

from __future__ import annotations

import functools
import itertools
import threading

import torch

from flashmoe_science.errors import DeviceError

_SLOTS = 1 << 16
_SLOT_BYTES = 4
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)  # missing from CPU builds of torch


class TicketPool:
    """The counters of one device: 256 KiB, allocated once."""

    def __init__(self, device: int) -> None:
        self._counters = torch.zeros(_SLOTS, dtype=torch.int32, device=f"cuda:{device}")
        torch.cuda.current_stream(device).synchronize()  # other streams may use them at once
        self._start = self._counters.data_ptr()
        self._next = itertools.count()
        self._of_stream: dict[int, int] = {}

    def take(self, stream: int) -> int:
        """The address of the counter for a launch on this stream (a raw handle).

        Raises:
            DeviceError: all counters are in use.
        """
        if _is_capturing is not None and _is_capturing():
            return self._new()
        address = self._of_stream.get(stream)
        if address is None:
            # Two threads that come here for one stream at once must end up with one counter.
            address = self._of_stream.setdefault(stream, self._new())
        return address

    def _new(self) -> int:
        index = next(self._next)
        if index >= _SLOTS:
            raise DeviceError(
                f"this process has captured {_SLOTS} attention launches in CUDA graphs, the most that are kept "
                "apart; capture fewer, or set FLASHMOE_CUDA_KERNEL=portable"
            )
        return self._start + index * _SLOT_BYTES


_lock = threading.Lock()


@functools.cache
def _pool(device: int) -> TicketPool:
    return TicketPool(device)


def ticket_pool(device: int) -> TicketPool:
    """The device's pool."""
    with _lock:
        return _pool(device)
