"""Compiling the CUDA kernels ahead of time, for any architecture, on any machine.

No list names them: `flashmoe_science.cuda.kernels` finds them, and an operation's definition says which are its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from flashmoe_science.cuda import kernels
from flashmoe_science.jit.cache import CompileCache, default_cache
from flashmoe_science.jit.limits import base_architecture
from flashmoe_science.jit.nvrtc import CudaKernel, compile_kernel
from flashmoe_science.jit.records import KernelBuild

__all__ = ["build", "kernels", "kernels_of"]


def kernels_of(architectures: Iterable[str], *listed: Callable[[str], list[CudaKernel]]) -> list[CudaKernel]:
    """What functions called ``kernels`` of `flashmoe_science.cuda` give for these (``sm_90``, ``sm_90a``)."""
    names = dict.fromkeys(base_architecture(name) for name in architectures)
    return [kernel for name in names for of_module in listed for kernel in of_module(name)]


def build(architectures: Iterable[str], cache: CompileCache | None = None) -> list[KernelBuild]:
    """Compile all of `kernels(architectures)`, several at a time.

    Raises:
        BuildError: the first kernel that does not compile, spills, or does not fit.
        DeviceError: no NVRTC, or an architecture that it or we do not know.
    """
    wanted = kernels(architectures)
    shared = default_cache() if cache is None else cache
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(lambda kernel: compile_kernel(kernel, shared), wanted))
