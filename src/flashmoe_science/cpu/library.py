"""The kernels in kernels/cpu: compiled at first use and loaded; and what the machine reaches at most."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.jit.records import KernelBuild

SOURCES = Path(__file__).resolve().parents[1] / "kernels" / "cpu"
KERNELS = (
    "attention_forward",
    "attention_backward",
    "attention_varlen",
    "moe_forward",
    "moe_backward",
    "topk_routing",
    "topk_routing_backward",
    "paged_append",
    "peaks",
)
"""Source files in kernels/cpu, without their ending."""
ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As the kernels number them (numbers.h)."""
CPU = torch.device("cpu")
_Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
_PEAK_SECONDS = 0.08
_COPY_BYTES = 96 << 20


def _allocate(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device=CPU)


allocate: _Allocate = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cpu", _allocate
)
"""An uninitialised tensor on the CPU, from (sizes, strides, dtype): PyTorch's own short cut where it has one."""


def build(names: Sequence[str] = KERNELS, instruction_set: InstructionSet | None = None) -> list[KernelBuild]:
    """Kernels of the CPU for this machine: compiled now, or found in the cache.

    Args:
        names: some of ``KERNELS``; all unless given.
        instruction_set: compile for this one; the one that calls take unless given.

    Raises:
        BuildError, DeviceError: see `flashmoe_science.jit.host.build`.
    """
    chosen = instruction_set or host.choose_instruction_set()
    return [host.build(SOURCES / f"{name}.cpp", name, chosen) for name in names]


@functools.cache
def peaks_library() -> ctypes.CDLL:
    """The library that measures the machine, loaded once: what is written to the cache later changes nothing here.

    Raises:
        BuildError, DeviceError: as `build`.
    """
    return host.load(host.build(SOURCES / "peaks.cpp", "peaks", host.choose_instruction_set()))


def measure_peaks() -> dict[str, float]:
    """What this machine reaches at most with torch.get_num_threads() threads, measured now (about 0.3 s).

    Returns:
        ``fp32_gflops``: fused multiply-adds, 2 operations each (a multiply and an add on a CPU without them);
        ``bf16_gflops``: bf16 dot products with fp32 sums, on the matrix unit (AMX) where there is one; only
        where the CPU has them;
        ``copy_gbps``: GB/s read and written by a copy between buffers larger than most caches.

    Raises:
        BuildError, DeviceError: as `build`.
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
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=CPU)
    target = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=CPU)
    copy = library.flashmoe_peak_copy
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    copy.restype = ctypes.c_double
    measured["copy_gbps"] = copy(source.data_ptr(), target.data_ptr(), _COPY_BYTES, threads, 5) * 1e-9
    return measured


def measure_reading(tensor: torch.Tensor) -> float:
    """GB/s at which torch.get_num_threads() threads read this contiguous tensor once, in order, measured now.

    Raises:
        BuildError, DeviceError: as `build`.
    """
    library = peaks_library()
    read = library.flashmoe_peak_read
    read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    read.restype = ctypes.c_double
    rate: float = read(tensor.data_ptr(), tensor.numel() * tensor.element_size(), torch.get_num_threads())
    return rate * 1e-9


def load_function(
    kernel: str,
    method: str,
    instruction_set: InstructionSet,
    macros: Mapping[str, int] | None = None,
    further_features: Sequence[str] = (),
) -> Callable[..., int]:
    """The PyMethodDef called ``method`` of a source file in kernels/cpu, as a built-in function."""
    source = SOURCES / f"{kernel}.cpp"
    build = host.build(source, kernel, instruction_set, macros=macros, further_features=further_features)
    library = host.load(build)
    address = ctypes.addressof(ctypes.c_char.in_dll(library, method))
    new_function = ctypes.pythonapi.PyCFunction_NewEx
    new_function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    new_function.restype = ctypes.py_object
    function: Callable[..., int] = new_function(address, None, None)
    return function


def byte_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Of the first three dimensions, as the kernels take them."""
    return tuple(stride * tensor.element_size() for stride in tensor.stride()[:3])
