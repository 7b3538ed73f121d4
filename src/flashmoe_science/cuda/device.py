"""The GPU that a call runs on, as far as choosing a kernel depends on it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from flashmoe_science.jit.limits import device_architecture, limits
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
    name: str = ""
    """As PyTorch gives it, by which tables of tuned configurations know it; empty: none is asked."""


def element_types(architecture: str) -> tuple[torch.dtype, ...]:
    """Of 16 bits, that the tensor cores take."""
    return (torch.float16, torch.bfloat16) if limits(architecture).bfloat16 else (torch.float16,)


def why_not_type(dtype: torch.dtype, device: Device) -> str | None:
    taken = dtype != torch.bfloat16 or limits(device.architecture).bfloat16
    return None if taken else f"{device.architecture} has no bfloat16"


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
        name=properties.name,
    )


_MIB = 1 << 20
GPUS = {
    "T4": Device(0, "sm_75", 40, 4 * _MIB, name="Tesla T4"),
    "A100": Device(0, "sm_80", 108, 40 * _MIB, name="NVIDIA A100-SXM4-80GB"),
    "A10": Device(0, "sm_86", 72, 6 * _MIB, name="NVIDIA A10"),
    "L4": Device(0, "sm_89", 58, 48 * _MIB, name="NVIDIA L4"),
    "L40S": Device(0, "sm_89", 142, 96 * _MIB, name="NVIDIA L40S"),
    "RTX 4090": Device(0, "sm_89", 128, 72 * _MIB, name="NVIDIA GeForce RTX 4090"),
    "H100": Device(0, "sm_90", 132, 50 * _MIB, name="NVIDIA H100 80GB HBM3"),
    "H200": Device(0, "sm_90", 132, 60 * _MIB, name="NVIDIA H200"),  # of L2 as its driver says; published: 50
    "B200": Device(0, "sm_100", 148, 126 * _MIB, name="NVIDIA B200"),
}
"""GPUs by name, with NVIDIA's published figures of their largest form: to ask about one that is not there."""
