"""Launches of the Hopper kernels of attention backward, made by their own source on the CPU."""

from __future__ import annotations

import ctypes

import pytest
import torch
from emulated import compile_emulation
from emulated_launches import EmulatedMap

from flashmoe_science.cuda import launch
from flashmoe_science.cuda.attention.gradients import hopper, wgmma
from flashmoe_science.jit.nvrtc import CudaKernel

_PARAMETERS = {
    "attention_backward_hopper": "backward::Parameters",
    "attention_backward_short": "backward::Parameters",
    "attention_backward_two_pass_key_value": "two_pass::Parameters",
    "attention_backward_two_pass_query": "two_pass::Parameters",
    "attention_backward_prepare": "Parameters",
    "attention_backward_convert": "Parameters",
}


OF_PRIORITY = 9
"""A stream."""


class RowsLauncher:
    """In the place of `cuda.launch.Launcher`, for grids of two dimensions."""

    def __init__(
        self, function: object, grid: tuple[int, int, int], kernel: CudaKernel, size: int, *, dependent: bool
    ) -> None:
        storage = ctypes.create_string_buffer(size + 64)
        self.buffer = (ctypes.c_char * size).from_buffer(storage, -ctypes.addressof(storage) % 64)
        self._grid = grid
        self._library = compile_emulation(kernel, _PARAMETERS[kernel.function])

    def start(self, stream: int) -> None:
        """All blocks of a kernel of one dimension side by side, as they may wait for each other; on `OF_PRIORITY` one
        after another, as where another grid has all other multiprocessors.
        """
        width, rows, _ = self._grid
        together = width if rows == 1 and stream != OF_PRIORITY else 1
        self._library.run_together(self.buffer, width, rows, together)


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "load", lambda *arguments, **options: None)
    monkeypatch.setattr(launch, "Launcher", RowsLauncher)
    monkeypatch.setattr(wgmma, "TensorMap", EmulatedMap)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(hopper, "has_default_priority", lambda stream: stream != OF_PRIORITY)
