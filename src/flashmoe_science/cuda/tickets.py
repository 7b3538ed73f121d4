"""Counters in device memory: for the tiles of persistent Hopper kernels, and for the splits of small-shape kernels.

A launch finds its counters at zero and leaves them so. Launches on one stream run one after another and share theirs;
one captured in a CUDA graph, which any stream may replay, keeps its own. The two kinds have a pool each: only in its
own do all users wait for their predecessor's end.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch

from flashmoe_science.configs.attention import decode
from flashmoe_science.configs.attention.small import MOST_ARRIVALS
from flashmoe_science.cuda.kept import kept

_TICKETS = 1 << 16
_ARRIVALS = 1 << 17
_DECODE_ARRIVALS = 1 << 19
"""For a graph of 200 launches."""
_PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD: one handle, another stream in every thread
# Missing from CPU builds of torch.
is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
"""Whether the current stream is being captured in a CUDA graph. The default stream, whose handle is 0, never is: with
its handle there is no need to ask, which takes half a microsecond.
"""


class _OfThread(threading.local):
    address: int | None = None


class TicketPool:
    """The counters of one device. More launches than there are counters get new ones.

    Under capture that is an allocation of the graph, zeroed by a node of its own before the launch. Nothing else
    keeps it: its memory is the graph's, and what the capture puts there next must come after the launch. `reserve`, in
    time, saves that node.
    """

    def __init__(self, counters: torch.Tensor, most: int = 1) -> None:
        """
        Args:
            counters: int32, zero for work on every stream.
            most: how many a launch may take; a stream keeps so many.
        """
        self._counters = counters
        self._size = len(counters)
        self._most = most
        self._lock = threading.Lock()
        self._taken = 0
        self._of_stream: dict[int, int] = {}
        self._of_thread = _OfThread()
        self._more: list[torch.Tensor] = []
        self.is_scarce = False
        """Whether `reserve` would take new ones."""

    def reserve(self) -> None:
        """Have enough for the graphs that are captured next: half as many as at first. Waits for the current stream if
        that takes new ones; not while it is being captured.
        """
        if not self.is_scarce:
            return
        size = self._size
        fresh = zeros_to_keep(size, self._counters.device)
        with self._lock:
            self._more.append(self._counters)
            self._counters, self._taken, self.is_scarce = fresh, 0, False

    def take(self, stream: int, count: int = 1) -> int:
        """The address of the `count` counters for a launch on this stream, PyTorch's current one (a raw handle).

        The launch must be the next that is done on the stream, and what it reads or writes be allocated before: a
        graph's own counters are given back to it at once.
        """
        if stream and is_capturing():
            address = self._unused(count)
            if address is None:
                address = torch.zeros(count, dtype=torch.int32, device=self._counters.device).data_ptr()
            return address
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

    def _unused(self, count: int) -> int | None:
        with self._lock:
            counters, first = self._counters, self._taken
            if first + count > len(counters):
                return None
            self._taken = first + count
            self.is_scarce = 2 * (self._size - self._taken) < self._size
        return counters.data_ptr() + first * counters.element_size()

    def _new(self) -> int:
        address = self._unused(self._most)
        if address is None:
            counters = zeros_to_keep(self._most, self._counters.device)
            self._more.append(counters)
            address = counters.data_ptr()
        return address


def zeros_to_keep(count: int, device: torch.device | str) -> torch.Tensor:
    """Zeros (count) int32 that outlive the call, ready for work on every stream."""

    def make() -> torch.Tensor:
        zeros = torch.zeros(count, dtype=torch.int32, device=device)
        if zeros.is_cuda:
            torch.cuda.current_stream(zeros.device).synchronize()  # other streams may use them at once
        return zeros

    return kept(make)


_lock = threading.Lock()


@functools.cache
def _pool(device: int, counters: int, most: int) -> TicketPool:
    return TicketPool(zeros_to_keep(counters, f"cuda:{device}"), most)


def ticket_pool(device: int) -> TicketPool:
    """The device's pool for the Hopper kernel: 256 KiB, allocated once."""
    with _lock:
        return _pool(device, _TICKETS, 1)


def arrival_pool(device: int) -> TicketPool:
    """The device's pool for splits: 512 KiB to begin with."""
    with _lock:
        return _pool(device, _ARRIVALS, MOST_ARRIVALS)


def decode_arrival_pool(device: int) -> TicketPool:
    """The device's pool for the blocks of the decode kernel: 2 MiB to begin with."""
    with _lock:
        return _pool(device, _DECODE_ARRIVALS, decode.MOST_ARRIVALS)
