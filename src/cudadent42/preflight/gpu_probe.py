"""What the NVIDIA driver says, asked in a process of its own.

A broken driver can hang or crash the process that calls it, and a process that has initialised CUDA cannot
fork safely; so a child asks, with a time limit. Only ctypes: no torch, and no cuda.core, which hangs on its
second call where there is no driver.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cudadent42.base.reading import parse_json

_TIMEOUT_S = 20.0
LIBCUDA_PLACES = (
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib64/nvidia",
    "/usr/lib/nvidia",
    "/run/opengl-driver/lib",
    "/home/kubernetes/bin/nvidia/lib64",
    "/usr/local/cuda/compat",
)


@dataclass(frozen=True)
class Gpu:
    """One device, in the driver's order."""

    name: str
    compute_capability: str
    """``9.0``."""
    memory_bytes: int
    multiprocessors: int
    uuid: str = ""
    """The same in every process, whatever ``CUDA_VISIBLE_DEVICES`` leaves it; empty where the driver does not say."""


@dataclass(frozen=True)
class Monitor:
    """What NVML says of one device. None: it does not say."""

    driver_version: str
    pids: tuple[int, ...]
    """Compute processes of others."""
    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    temperature_c: int | None
    power_limit_w: float | None
    throttle: tuple[str, ...]
    """Reasons that slow the clocks now, other than idleness."""


@dataclass(frozen=True)
class GpuProbe:
    hardware: int
    """NVIDIA display or 3D controllers on the PCI bus, or device nodes where that is more."""
    libcuda: str
    """``loaded``, ``missing``, or the folder that has it where the loader does not find it."""
    init_code: int | None
    """Of cuInit; None where it was not called."""
    init_name: str
    driver_cuda: str
    """The newest CUDA that the driver serves, ``13.0``; empty where unknown."""
    gpus: tuple[Gpu, ...]
    monitors: tuple[Monitor, ...] | None
    """By device; None where nvidia-ml-py is not installed or NVML failed."""
    timed_out: bool = False

    @property
    def present(self) -> bool:
        return self.hardware > 0 or bool(self.gpus)

    @property
    def usable(self) -> bool:
        return self.init_code == 0 and bool(self.gpus)


NO_GPU = GpuProbe(0, "missing", None, "", "", (), None)


class Pending:
    """A probe under way, so that the caller can do something else meanwhile."""

    def __init__(self) -> None:
        self._hardware = count_hardware()
        self._child: subprocess.Popen[str] | None = None
        if self._hardware or _load_libcuda() is not None or find_libcuda():
            self._child = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    def result(self, timeout_s: float = _TIMEOUT_S) -> GpuProbe:
        if self._child is None:
            return NO_GPU
        try:
            out, _ = self._child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()
            return GpuProbe(self._hardware, "loaded", None, "", "", (), None, timed_out=True)
        if self._child.returncode != 0:
            return GpuProbe(
                self._hardware,
                "loaded",
                -1,
                f"the driver's library ended the process ({_ending(self._child)})",
                "",
                (),
                None,
            )
        return _decode(parse_json(out))


def _ending(child: subprocess.Popen[str]) -> str:
    code = child.returncode
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _decode(data: dict[str, Any]) -> GpuProbe:
    monitors = data["monitors"]
    return GpuProbe(
        hardware=data["hardware"],
        libcuda=data["libcuda"],
        init_code=data["init_code"],
        init_name=data["init_name"],
        driver_cuda=data["driver_cuda"],
        gpus=tuple(Gpu(**gpu) for gpu in data["gpus"]),
        monitors=None
        if monitors is None
        else tuple(
            Monitor(**(item | {"pids": tuple(item["pids"]), "throttle": tuple(item["throttle"])}))
            for item in monitors
        ),
    )


def count_hardware(root: Path = Path("/")) -> int:
    """NVIDIA GPUs that the kernel sees, driver or not."""
    on_bus = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        on_bus += vendor == "0x10de" and kind.startswith("0x03")
    nodes = len(list((root / "dev").glob("nvidia[0-9]*"))) + (root / "dev/dxg").exists()
    return max(on_bus, nodes)


def find_libcuda() -> str | None:
    """A usual folder that holds libcuda.so.1."""
    return next((folder for folder in LIBCUDA_PLACES if Path(folder, "libcuda.so.1").exists()), None)


def _load_libcuda() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def probe() -> GpuProbe:
    """Ask the driver, in this process."""
    hardware = count_hardware()
    library = _load_libcuda()
    if library is None:
        return GpuProbe(hardware, find_libcuda() or "missing", None, "", "", (), None)
    code = library.cuInit(0)
    if code != 0:
        return GpuProbe(hardware, "loaded", code, _error_name(library, code), "", (), None)
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    return GpuProbe(
        hardware=max(hardware, count.value),
        libcuda="loaded",
        init_code=0,
        init_name="",
        driver_cuda=f"{version.value // 1000}.{version.value % 1000 // 10}",
        gpus=tuple(_describe(library, index) for index in range(count.value)),
        monitors=_monitors(count.value),
    )


def _error_name(library: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorName(code, ctypes.byref(text))
    return (text.value or b"").decode(errors="replace") or f"error {code}"


def _describe(library: ctypes.CDLL, index: int) -> Gpu:
    device = ctypes.c_int()
    library.cuDeviceGet(ctypes.byref(device), index)
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGetName(name, 256, device)
    memory = ctypes.c_size_t()
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    return Gpu(
        name=name.value.decode(errors="replace"),
        compute_capability=f"{attribute(75)}.{attribute(76)}",  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
        memory_bytes=memory.value,
        multiprocessors=attribute(16),  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        uuid=_uuid(library, device),
    )


def _uuid(library: ctypes.CDLL, device: ctypes.c_int) -> str:
    ask = getattr(library, "cuDeviceGetUuid_v2", None)  # of a part of a GPU, the part's
    number = (ctypes.c_ubyte * 16)()
    return f"GPU-{uuid.UUID(bytes=bytes(number))}" if ask is not None and ask(number, device) == 0 else ""


def _monitors(count: int) -> tuple[Monitor, ...] | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        handles = [_nvml_handle(pynvml, index) for index in range(count)]
        return tuple(_monitor(pynvml, handle, driver) for handle in handles)
    except pynvml.NVMLError:
        return None


def _nvml_handle(pynvml: Any, index: int) -> Any:
    # NVML numbers all devices, CUDA those that CUDA_VISIBLE_DEVICES leaves: follow the entries it names.
    entries = [
        entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()
    ]
    entry = entries[index] if index < len(entries) else str(index)
    if entry.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(entry))
    return pynvml.nvmlDeviceGetHandleByUUID(entry)


def _monitor(pynvml: Any, handle: Any, driver: str) -> Monitor:
    def ask(call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(handle, *arguments)
        except pynvml.NVMLError:
            return None

    # Our own tree is not "another user": the caller is this process's parent.
    own = {os.getpid(), os.getppid()}
    pids = tuple(
        item.pid for item in ask(pynvml.nvmlDeviceGetComputeRunningProcesses) or () if item.pid not in own
    )
    limit_mw = ask(pynvml.nvmlDeviceGetPowerManagementLimit)
    reasons = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
    slowing = {
        "software thermal slowdown": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
        "hardware slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
        "hardware thermal slowdown": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "power brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        "power cap": pynvml.nvmlClocksEventReasonSwPowerCap,
    }
    return Monitor(
        driver_version=driver,
        pids=pids,
        sm_clock_mhz=ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        max_sm_clock_mhz=ask(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM),
        temperature_c=ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
        throttle=tuple(name for name, bit in slowing.items() if reasons & bit),
    )


if __name__ == "__main__":
    json.dump(asdict(probe()), sys.stdout)
