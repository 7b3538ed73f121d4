"""Compiling a user's kernel, for this machine or for architectures that are not present. Runs none of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from cudadent42.native.problem import ELEMENTS
from cudadent42.native.specification import Configuration, Specification
from cudadent42.operations.attention.case import AttentionCase
from flashmoe_science.jit import host
from flashmoe_science.jit.limits import base_architecture
from flashmoe_science.jit.nvrtc import CudaKernel, compile_kernel
from flashmoe_science.jit.records import KernelBuild

INCLUDE_DIRECTORY = Path(__file__).parent / "include"

USUAL_HEAD_DIMS = (64, 128)
"""What is compiled ahead where neither the kernel nor the cases say which."""

T = TypeVar("T")

_ELEMENT = "CUDADENT42_ELEMENT"
_HEAD_DIM = "CUDADENT42_HEAD_DIM"


def toolkit_include_directories() -> tuple[Path, ...]:
    """Where CUDA's own headers are: in NVIDIA's wheels or an installed toolkit; empty if nowhere."""
    from cuda import pathfinder

    directories = (pathfinder.find_nvidia_header_directory(name) for name in ("cudart", "cccl", "nvcc"))
    return tuple(dict.fromkeys(Path(directory) for directory in directories if directory is not None))


def cuda_kernel(
    specification: Specification, configuration: Configuration, dtype: str, head_dim: int, architecture: str
) -> CudaKernel:
    """What is compiled and launched for a dtype and head dim on a GPU of ``architecture`` (``sm_90``)."""
    folder = specification.source.parent
    return CudaKernel(
        source=specification.source.name,
        function=specification.entry,
        architecture=configuration.compiled_for(architecture),
        macros={_ELEMENT: ELEMENTS[dtype], _HEAD_DIM: head_dim, **configuration.macros},
        threads_per_block=configuration.threads,
        dynamic_shared_bytes=configuration.dynamic_shared_bytes(head_dim),
        directory=folder,
        header_directory=folder,
        more_header_directories=(INCLUDE_DIRECTORY,),
        include_directories=toolkit_include_directories() if specification.toolkit_headers else (),
    )


def build_cuda(kernel: CudaKernel) -> KernelBuild:
    """Compiled, or from the cache. Spills are the user's to judge: the resource table shows them.

    Raises BuildError where it does not compile or does not fit the architecture, DeviceError without NVRTC.
    """
    return compile_kernel(kernel, allow_defects=True)


def build_host(specification: Specification, configuration: Configuration, dtype: str) -> KernelBuild:
    """The shared library for a dtype on this machine. Raises BuildError, DeviceError."""
    return host.build(
        specification.source,
        specification.entry,
        host.choose_instruction_set(),
        macros=host_macros(configuration, dtype),
        include_directories=(INCLUDE_DIRECTORY,),
    )


def host_macros(configuration: Configuration, dtype: str) -> dict[str, int]:
    """What a ``.cpp`` is compiled with for a dtype."""
    return {_ELEMENT: ELEMENTS[dtype], **configuration.macros}


def macros_of(
    specification: Specification, configuration: Configuration, case: AttentionCase, architecture: str | None
) -> dict[str, int]:
    """What a case's code is compiled with; ``architecture`` is None on a CPU."""
    if architecture is None:
        return host_macros(configuration, case.dtype)
    return dict(cuda_kernel(specification, configuration, case.dtype, case.head_dim, architecture).macros)


def cuda_kernels(
    specification: Specification,
    architectures: Sequence[str],
    dtypes: Sequence[str],
    head_dims: Sequence[int],
) -> list[CudaKernel]:
    """Every kernel that these can lead to; all of the kernel's own where none are given."""
    bases = dict.fromkeys(base_architecture(name) for name in architectures)
    kernels: dict[tuple[object, ...], CudaKernel] = {}
    for architecture in bases:
        for dtype in _either(dtypes, specification.dtypes):
            for head_dim in _head_dims(specification, head_dims):
                configuration = specification.find(dtype, head_dim, architecture)
                if configuration is not None:
                    kernel = cuda_kernel(specification, configuration, dtype, head_dim, architecture)
                    kernels.setdefault((kernel.architecture, kernel.label), kernel)
    return list(kernels.values())


def host_configurations(
    specification: Specification, dtypes: Sequence[str], head_dims: Sequence[int]
) -> list[tuple[Configuration, str]]:
    """Every configuration and dtype that these can lead to, as `cuda_kernels`."""
    configurations: list[tuple[Configuration, str]] = []
    for dtype in _either(dtypes, specification.dtypes):
        for head_dim in _head_dims(specification, head_dims):
            configuration = specification.find(dtype, head_dim, None)
            if configuration is not None and (configuration, dtype) not in configurations:
                configurations.append((configuration, dtype))
    return configurations


def _head_dims(specification: Specification, wanted: Sequence[int]) -> Sequence[int]:
    own = specification.head_dims
    return _either(wanted, own) if wanted else own or USUAL_HEAD_DIMS


def _either(wanted: Sequence[T], own: Sequence[T]) -> Sequence[T]:
    """Of what is wanted that which the kernel does, or all that it does."""
    return [item for item in wanted if not own or item in own] if wanted else own
