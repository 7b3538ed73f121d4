"""Lengths in device memory, for calls whose lengths the host knows.

They are never freed: a CUDA graph that was captured reads them long after the plan, or the thread, that asked for them.
"""

from __future__ import annotations

import functools
import threading

import torch

from flashmoe_science.cuda.kept import kept
from flashmoe_science.cuda.tickets import is_capturing
from flashmoe_science.errors import CaptureError

_CHUNK = 1 << 16
"""Numbers that are allocated at a time: 256 KiB."""
_ALIGNMENT = 4
"""Of the first of some numbers: 16 bytes."""


class LengthTable:
    """The lengths of one device: the same numbers once."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, ...], torch.Tensor] = {}
        self._chunk = torch.empty(0, dtype=torch.int32, device="cpu")
        self._used = 0
        self._stream: torch.cuda.Stream | None = None
        """Of its own: who waits for lengths to be there does not wait for what a call's stream has to do."""

    def get(self, numbers: tuple[int, ...]) -> torch.Tensor:
        """int32, contiguous, ready for work on every stream.

        Raises:
            CaptureError: they are not there yet, and a CUDA graph is being captured.
        """
        lengths = self._kept.get(numbers)
        if lengths is not None:
            return lengths
        if is_capturing():
            raise CaptureError(
                "the lengths of this call are not on the GPU yet, and nothing can be kept there while a CUDA graph is "
                "captured; call the function once with these shapes before capturing"
            )
        with self._lock:
            if numbers not in self._kept:
                self._kept[numbers] = self._store(numbers)
            return self._kept[numbers]

    def _store(self, numbers: tuple[int, ...]) -> torch.Tensor:
        if self._device.startswith("cuda") and self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            lengths = self._copied(numbers)
        if self._stream is not None:
            self._stream.synchronize()  # other streams may read them at once
        return lengths

    def _copied(self, numbers: tuple[int, ...]) -> torch.Tensor:
        count = len(numbers)
        if self._used + count > len(self._chunk):
            size = max(_CHUNK, count)
            self._chunk = kept(functools.partial(torch.empty, size, dtype=torch.int32, device=self._device))
            self._used = 0
        lengths = self._chunk[self._used : self._used + count]
        self._used += -(-count // _ALIGNMENT) * _ALIGNMENT
        lengths.copy_(torch.tensor(numbers, dtype=torch.int32, device="cpu"))
        return lengths


_lock = threading.Lock()


@functools.cache
def _table(device: int) -> LengthTable:
    return LengthTable(f"cuda:{device}")


def length_table(device: int) -> LengthTable:
    """The device's table, of which there is one."""
    with _lock:
        return _table(device)
