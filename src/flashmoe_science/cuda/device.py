"""The GPU that a call runs on, as far as choosing a kernel depends on it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from flashmoe_science.jit.limits import device_architecture
from flashmoe_science.jit.nvrtc import nvrtc_version


@dataclass(frozen=True)
class Device:
    """A GPU, as far as choosing a kernel depends on it."""

    index: int
    architecture: str
    """Without suffix, e.g. ``sm_90``."""
    multiprocessors: int
    l2_bytes: int
    nvrtc: tuple[int, int] = (13, 0)
    """Version of the compiler that kernels for it are made with."""


@functools.cache
def device_of(index: int) -> Device:
    """The device's properties; DeviceError if it is too old for every kernel, or there is no NVRTC."""
    properties = torch.cuda.get_device_properties(index)
    return Device(
        index=index,
        architecture=device_architecture(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        nvrtc=nvrtc_version(),
    )


_MIB = 1 << 20
GPUS = {
    "T4": Device(0, "sm_75", 40, 4 * _MIB),
    "A100": Device(0, "sm_80", 108, 40 * _MIB),
    "A10": Device(0, "sm_86", 72, 6 * _MIB),
    "L4": Device(0, "sm_89", 58, 48 * _MIB),
    "L40S": Device(0, "sm_89", 142, 96 * _MIB),
    "RTX 4090": Device(0, "sm_89", 128, 72 * _MIB),
    "H100": Device(0, "sm_90", 132, 50 * _MIB),
    "H200": Device(0, "sm_90", 132, 50 * _MIB),
    "B200": Device(0, "sm_100", 148, 126 * _MIB),
}
"""GPUs by name, with NVIDIA's published figures of their largest form: to ask about one that is not there."""
