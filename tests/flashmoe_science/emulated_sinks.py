"""The kernel of `cuda.attention.gradients.sinks` on the CPU, in calls of tensors there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_launches import EmulatedLauncher

from flashmoe_science.cuda import launch
from flashmoe_science.cuda.attention.gradients import sinks
from flashmoe_science.cuda.tickets import TicketPool
from problems import H200


def emulate(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Plans launch the emulation, and calls of 16-bit tensors on the CPU make them; the counters of all launches."""
    counters = torch.zeros(4 * sinks.MOST_ARRIVALS, dtype=torch.int32)
    pool = TicketPool(counters, sinks.MOST_ARRIVALS)
    monkeypatch.setattr(launch, "load", lambda *arguments, **options: None)
    monkeypatch.setattr(launch, "Launcher", EmulatedLauncher)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(sinks, "arrival_pool", lambda index: pool)
    monkeypatch.setattr(sinks, "device_of", lambda index: H200)
    monkeypatch.setattr(sinks, "make_context_current", lambda index: None)
    monkeypatch.setattr(sinks, "cuda_allocator", lambda: _allocate)
    monkeypatch.setattr(sinks, "takes", lambda output: sinks.why_not(output) is None)
    monkeypatch.setattr(sinks, "_calls", _call)
    return counters


def _allocate(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Full of what would be seen in a result."""
    return torch.empty_strided(sizes, strides, dtype=dtype).fill_(
        torch.nan if dtype.is_floating_point else 255
    )


def _call(tensors: tuple[torch.Tensor, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
    return sinks._make_call(tensors, options, 0)(*tensors)
