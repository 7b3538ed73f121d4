"""What kernels with wgmma and TMA run on, and are compiled by."""

from __future__ import annotations

from flashmoe_science.cuda.device import Device
from flashmoe_science.jit.limits import base_architecture
from flashmoe_science.jit.nvrtc import nvrtc_version

_ARCHITECTURE = "sm_90"
_FIRST_NVRTC = (12, 9)  # 12.6 and 12.8 serialise wgmma (C7515)


def why_not_device(device: Device) -> str | None:
    """Why they do not run on a GPU, or are not compiled for it; None if they are."""
    if base_architecture(device.architecture) != _ARCHITECTURE:
        return f"it needs {_ARCHITECTURE}, and the GPU is {device.architecture}"
    if device.nvrtc < _FIRST_NVRTC:
        needed, there = (".".join(map(str, version)) for version in (_FIRST_NVRTC, device.nvrtc))
        return f"it needs NVRTC {needed} or later, and this is {there}"
    return None


def built_for(architecture: str) -> bool:
    return base_architecture(architecture) == _ARCHITECTURE and nvrtc_version() >= _FIRST_NVRTC
