"""Which CUDA architecture Google's accelerators have: what a kernel is compiled for before a machine is started.

Names: https://cloud.google.com/compute/docs/gpus; capabilities: https://developer.nvidia.com/cuda-gpus.
"""

from __future__ import annotations

_ARCHITECTURES = {
    "nvidia-tesla-p4": "sm_61",
    "nvidia-tesla-p100": "sm_60",
    "nvidia-tesla-v100": "sm_70",
    "nvidia-tesla-t4": "sm_75",
    "nvidia-tesla-a100": "sm_80",
    "nvidia-a100-80gb": "sm_80",
    "nvidia-l4": "sm_89",
    "nvidia-h100-80gb": "sm_90",
    "nvidia-h100-mega-80gb": "sm_90",
    "nvidia-h200-141gb": "sm_90",
    "nvidia-b200": "sm_100",
    "nvidia-rtx-pro-6000": "sm_120",
}

_OF_MACHINE_TYPES = {
    "g2-": "nvidia-l4",
    "g4-": "nvidia-rtx-pro-6000",
    "a2-highgpu-": "nvidia-tesla-a100",
    "a2-megagpu-": "nvidia-tesla-a100",
    "a2-ultragpu-": "nvidia-a100-80gb",
    "a3-highgpu-": "nvidia-h100-80gb",
    "a3-edgegpu-": "nvidia-h100-80gb",
    "a3-megagpu-": "nvidia-h100-mega-80gb",
    "a3-ultragpu-": "nvidia-h200-141gb",
    "a4-highgpu-": "nvidia-b200",
}
"""Machine types that bring their accelerators."""

_VIRTUAL_WORKSTATION = "-vws"


def built_in(machine_type: str) -> str:
    """The accelerator that comes with a machine type; empty for a type that brings none."""
    return next((name for start, name in _OF_MACHINE_TYPES.items() if machine_type.startswith(start)), "")


def architecture(accelerator: str) -> str | None:
    """``sm_89`` for ``nvidia-l4``; None for one that is not known here."""
    return _ARCHITECTURES.get(accelerator.removesuffix(_VIRTUAL_WORKSTATION))
