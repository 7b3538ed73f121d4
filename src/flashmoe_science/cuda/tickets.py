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

_SLOTS = 1 << 16
_PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD: one handle, another stream in every thread
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)  # missing from CPU builds of torch


class _OfThread(threading.local):
    address: int | None = None


class TicketPool:
    """The counters of one device. More launches than there are counters get new ones.

    Under capture that is an allocation of the graph, zeroed by a node of its own before the launch. Nothing else
    keeps it: its memory is the graph's, and what the capture puts there next comes after the launch.
    """

    def __init__(self, counters: torch.Tensor) -> None:
        """`counters`: int32, zero for work on every stream."""
        self._counters = counters
        self._start = counters.data_ptr()
        self._next = itertools.count()
        self._of_stream: dict[int, int] = {}
        self._of_thread = _OfThread()
        self._more: list[torch.Tensor] = []

    def take(self, stream: int) -> int:
        """The address of the counter for a launch on this stream, PyTorch's current one (a raw handle).

        The launch must be the next that is done on the stream.
        """
        if _is_capturing is not None and _is_capturing():
            address = self._unused()
            return self._allocate().data_ptr() if address is None else address
        if stream == _PER_THREAD_STREAM:
            address = self._of_thread.address
            if address is None:
                address = self._of_thread.address = self._new()
            return address
        address = self._of_stream.get(stream)
        if address is None:
            # Two threads that come here for one stream at once must end up with one counter.
            address = self._of_stream.setdefault(stream, self._new())
        return address

    def _unused(self) -> int | None:
        index = next(self._next)
        return self._start + index * self._counters.element_size() if index < len(self._counters) else None

    def _new(self) -> int:
        address = self._unused()
        if address is None:
            counter = self._allocate()
            self._more.append(counter)
            address = counter.data_ptr()
        return address

    def _allocate(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self._counters.device)


_lock = threading.Lock()


@functools.cache
def _pool(device: int) -> TicketPool:
    counters = torch.zeros(_SLOTS, dtype=torch.int32, device=f"cuda:{device}")
    torch.cuda.current_stream(device).synchronize()  # other streams may use them at once
    return TicketPool(counters)


def ticket_pool(device: int) -> TicketPool:
    """The device's pool: 256 KiB, allocated once."""
    with _lock:
        return _pool(device)
