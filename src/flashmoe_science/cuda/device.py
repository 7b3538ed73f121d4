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
