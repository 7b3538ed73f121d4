"""The kernels in kernels/cpu: compiled at first use and loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.jit.records import KernelBuild

SOURCES = Path(__file__).resolve().parents[1] / "kernels" / "cpu"
KERNELS = tuple(sorted(source.stem for source in SOURCES.glob("*.cpp")))
"""Source files in kernels/cpu, without their ending."""
ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As the kernels number them (numbers.h)."""
CPU = torch.device("cpu")
_Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


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
    return [
        host.build(SOURCES / f"{name}.cpp", name, chosen, further_features=features_besides(name, chosen))
        for name in names
    ]


def features_besides(kernel: str, instruction_set: InstructionSet) -> tuple[str, ...]:
    """CPU features that a source file in kernels/cpu takes besides those of the instruction set: where there are no
    products of bf16, attention of 16-bit types takes those of integers.
    """
    in_integers = kernel == "attention_forward" and instruction_set is InstructionSet.AVX512
    return host.integer_dot_products(instruction_set) if in_integers else ()


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
