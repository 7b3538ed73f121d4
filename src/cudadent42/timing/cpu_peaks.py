"""What this machine's processor reaches at most, measured now with the kernels' own instructions (`peaks.cpp`)."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from flashmoe_science.cpu.library import SOURCES
from flashmoe_science.jit import host

_SOURCE = Path(__file__).with_name("peaks.cpp")
_PEAK_SECONDS = 0.08
_COPY_BYTES = 96 << 20


@functools.cache
def peaks_library() -> ctypes.CDLL:
    """The library that measures the machine, loaded once: what is written to the cache later changes nothing here.

    Raises:
        BuildError, DeviceError: see `flashmoe_science.jit.host.build`.
    """
    return host.load(
        host.build(_SOURCE, "peaks", host.choose_instruction_set(), include_directories=(SOURCES,))
    )


def measure_cpu_peaks() -> dict[str, float]:
    """What this machine reaches at most with torch.get_num_threads() threads, measured now (about 0.3 s).

    Returns:
        ``fp32_gflops``: fused multiply-adds, 2 operations each (a multiply and an add on a CPU without them);
        ``bf16_gflops``: bf16 dot products with fp32 sums, on the matrix unit (AMX) where there is one; only
        where the CPU has them;
        ``copy_gbps``: GB/s read and written by a copy between buffers larger than most caches.

    Raises:
        BuildError, DeviceError: see `flashmoe_science.jit.host.build`.
    """
    library = peaks_library()
    threads = torch.get_num_threads()
    measured: dict[str, float] = {}
    for name in ("fp32", "bf16"):
        function = library[f"flashmoe_peak_{name}"]
        function.argtypes = [ctypes.c_int, ctypes.c_double]
        function.restype = ctypes.c_double
        rate = function(threads, _PEAK_SECONDS)
        if rate > 0:
            measured[f"{name}_gflops"] = rate * 1e-9
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cpu")
    target = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cpu")
    copy = library.flashmoe_peak_copy
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    copy.restype = ctypes.c_double
    measured["copy_gbps"] = copy(source.data_ptr(), target.data_ptr(), _COPY_BYTES, threads, 5) * 1e-9
    return measured


def measure_reading(tensor: torch.Tensor) -> float:
    """GB/s at which torch.get_num_threads() threads read this contiguous tensor once, in order, measured now.

    Raises:
        BuildError, DeviceError: see `flashmoe_science.jit.host.build`.
    """
    library = peaks_library()
    read = library.flashmoe_peak_read
    read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    read.restype = ctypes.c_double
    rate: float = read(tensor.data_ptr(), tensor.numel() * tensor.element_size(), torch.get_num_threads())
    return rate * 1e-9
