"""Whole plans on the CPU: launches run the emulation of their kernels, one after another."""

from __future__ import annotations

import ctypes
import struct
from typing import Any, ClassVar

import pytest
import torch
from emulated import compile_emulation

from flashmoe_science.cuda import launch
from flashmoe_science.cuda.moe import hopper
from flashmoe_science.cuda.moe.gradients import hopper as backward_hopper
from flashmoe_science.jit.nvrtc import CudaKernel

PARAMETERS = {
    "attention_backward_sinks": "SinksParameters",
    "moe_count": "routing::Parameters",
    "moe_place": "routing::Parameters",
    "moe_hopper": "moe::Parameters",
    "moe_portable": "ProductParameters",
    "moe_combine": "combine::Parameters",
    "moe_backward_hopper": "moe::Parameters",
    "moe_backward_weights": "moe::WeightsParameters",
    "moe_backward_portable": "BackwardProductParameters",
    "moe_backward_portable_weights": "BackwardWeightsParameters",
    "moe_backward_routing": "RoutingGradientParameters",
    "moe_backward_bias": "BiasGradientParameters",
    "moe_backward_bias_routing": "BiasRoutingParameters",
}
_MAP = struct.Struct("2Q 5Q 4Q 5Q")


class EmulatedLauncher:
    """In the place of `cuda.launch.Launcher`."""

    copies_late = True
    order: ClassVar[list[str]] = []
    """Functions, as they were launched."""

    def __init__(
        self, function: object, grid: tuple[int, int, int], kernel: CudaKernel, size: int, *, dependent: bool
    ) -> None:
        assert grid[1:] == (1, 1)
        storage = ctypes.create_string_buffer(size + 64)
        self.buffer = (ctypes.c_char * size).from_buffer(storage, -ctypes.addressof(storage) % 64)
        self._blocks = grid[0]
        self._function = kernel.function
        self._library = compile_emulation(
            kernel, PARAMETERS[kernel.function], copies_late=EmulatedLauncher.copies_late
        )

    def start(self, stream: int) -> None:
        self.order.append(self._function)
        self._library.run(self.buffer, self._blocks)


class EmulatedMap:
    """In the place of `cuda.tensor_map.TensorMap`; `emulation/ptx/tma.cuh` says what is written."""

    def __init__(
        self,
        buffer: Any,
        offset: int,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        *,
        read_once: bool = False,
    ) -> None:
        self.address = 0
        self._buffer, self._offset = buffer, offset
        rank = len(sizes)

        def filled(values: tuple[int, ...], count: int, value: int) -> tuple[int, ...]:
            return (*values, *(value,) * (count - len(values)))

        self._rest = (
            rank,
            *filled(sizes, 5, 1),
            *filled(tuple(stride * dtype.itemsize for stride in strides), 4, 0),
            *filled(box, 5, 1),
        )

    def move(self, address: int) -> None:
        _MAP.pack_into(self._buffer, self._offset, address, *self._rest)
        self.address = address

    def has_address_at(self, offset: int) -> bool:
        return bool(struct.unpack_from("Q", self._buffer, self._offset + offset) == (self.address,))


@pytest.fixture
def emulated_launches(monkeypatch: pytest.MonkeyPatch) -> type[EmulatedLauncher]:
    """Plans made under it launch emulations, on addresses of CPU memory."""
    monkeypatch.setattr(launch, "load", lambda *arguments, **options: None)
    monkeypatch.setattr(launch, "Launcher", EmulatedLauncher)
    for module in (hopper, backward_hopper):
        monkeypatch.setattr(module, "TensorMap", EmulatedMap)
    monkeypatch.setattr(EmulatedLauncher, "order", [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return EmulatedLauncher
