"""Memory of a graph that is being captured: what is given back is there for the next allocation at once."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from flashmoe_science.cuda import tickets

_ALIGNMENT = 512


class ReusedMemory:
    """Gives each allocation the first place that fits, as a caching allocator may."""

    def __init__(self, size: int = 1 << 24) -> None:
        self._memory = torch.zeros(size, dtype=torch.uint8)
        self._taken: dict[int, int] = {}

    def allocate(self, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = -(-torch.Size(sizes).numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        start = 0
        for first, end in sorted(self._taken.items()):
            if first - start >= size:
                break
            start = end
        self._taken[start] = start + size
        tensor = self._memory[start : start + size].view(dtype)[: torch.Size(sizes).numel()]
        weakref.finalize(tensor, self._taken.pop, start)
        return tensor.as_strided(sizes, strides) if len(sizes) > 1 else tensor

    def zeros(self, count: int, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return self.allocate((count,), (1,), dtype).zero_()


def capture_into(memory: ReusedMemory, monkeypatch: pytest.MonkeyPatch, *users: Any) -> None:
    """What `users`, modules, and counters allocate comes from there, and every stream but 0 is captured."""
    monkeypatch.setattr(tickets, "torch", type("torch", (), {"zeros": memory.zeros, "int32": torch.int32}))
    for module in (tickets, *users):
        monkeypatch.setattr(module, "is_capturing", lambda: True)
    for module in users:
        monkeypatch.setattr(module, "cuda_allocator", lambda: memory.allocate)
