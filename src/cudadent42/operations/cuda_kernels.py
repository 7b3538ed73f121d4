"""Compiling the CUDA kernels ahead of time, for any architecture, on any machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from flashmoe_science.cuda import attention, moe, rotation, varlen
from flashmoe_science.cuda.varlen import append
from flashmoe_science.jit.cache import CompileCache, default_cache
from flashmoe_science.jit.limits import base_architecture
from flashmoe_science.jit.nvrtc import CudaKernel, compile_kernel
from flashmoe_science.jit.records import KernelBuild


def kernels(architectures: Iterable[str]) -> list[CudaKernel]:
    """Every kernel and configuration that a call could take on these (``sm_90``, ``sm_90a``); see `varlen_kernels`."""
    names = list(architectures)
    return [
        *attention_kernels(names),
        *attention_gradient_kernels(names),
        *varlen_kernels(names),
        *moe_kernels(names),
        *moe_gradient_kernels(names),
        *_kernels(rotation.kernels, names),
    ]


def attention_kernels(architectures: Iterable[str]) -> list[CudaKernel]:
    """Those of attention's forward pass."""
    return _kernels(attention.kernels, architectures)


def attention_gradient_kernels(architectures: Iterable[str]) -> list[CudaKernel]:
    """Those of attention's backward pass."""
    return _kernels(attention.gradients.kernels, architectures)


def varlen_kernels(architectures: Iterable[str]) -> list[CudaKernel]:
    """Those of attention over sequences of any lengths that common calls take, and of their cache; others compile at
    their first call.
    """
    names = list(architectures)
    return [*_kernels(varlen.kernels, names), *_kernels(append.kernels, names)]


def moe_kernels(architectures: Iterable[str]) -> list[CudaKernel]:
    """Those of the mixture of experts and its routing."""
    return _kernels(moe.kernels, architectures)


def moe_gradient_kernels(architectures: Iterable[str]) -> list[CudaKernel]:
    """Those of the backward pass of a mixture of experts, and of the forward pass that keeps what it needs."""
    return _kernels(moe.gradients.kernels, architectures)


def _kernels(
    of_operation: Callable[[str], list[CudaKernel]], architectures: Iterable[str]
) -> list[CudaKernel]:
    names = dict.fromkeys(base_architecture(name) for name in architectures)
    return [kernel for name in names for kernel in of_operation(name)]


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
