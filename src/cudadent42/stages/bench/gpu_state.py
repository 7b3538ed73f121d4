"""Clocks, power, temperature and throttle reasons of one GPU through NVML, where it is installed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from cudadent42.model.records import Conditions

_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal limit",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""NVML's clock event reasons that mean less speed than the clocks would allow (idle and user settings left
out)."""


@dataclass(frozen=True)
class GpuReading:
    sm_clock_mhz: float
    memory_clock_mhz: float
    power_w: float
    temperature_c: float
    throttle_reasons: str

    def add_to(self, conditions: Conditions) -> Conditions:
        return replace(
            conditions,
            sm_clock_mhz=self.sm_clock_mhz,
            memory_clock_mhz=self.memory_clock_mhz,
            power_w=self.power_w,
            temperature_c=self.temperature_c,
            throttle_reasons=self.throttle_reasons,
        )


class GpuState:
    """Reads one device; a call takes about a millisecond, so it belongs between blocks."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    def read(self) -> GpuReading:
        nvml, handle = self._nvml, self._handle
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return GpuReading(
            sm_clock_mhz=float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
            temperature_c=float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            throttle_reasons=throttle_words(bits),
        )


def throttle_words(bits: int) -> str:
    return ",".join(word for bit, word in _REASONS.items() if bits & bit)


def open_gpu_state(device: str) -> tuple[GpuState | None, str]:
    """The state reader of a CUDA device; or None and the reason (no nvidia-ml-py, no permission)."""
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return None, "clocks and throttling are not recorded: nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        state = GpuState(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
        state.read()
    except nvml.NVMLError as error:
        return None, f"clocks and throttling are not recorded: NVML says {error}"
    return state, ""
