"""`paged_append` as one launch on CUDA (`kernels/cuda/paged_append.cu`).

What it does not take PyTorch's operations do, and all if `OVERRIDE_VARIABLE` says so.
"""

from __future__ import annotations

import threading

import torch

from flashmoe_science.cuda.choice import asked_for
from flashmoe_science.cuda.device import device_of, element_types
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.launch import Launcher, loaded
from flashmoe_science.cuda.repeat import current_device, raw_stream
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.varlen.append_arguments import ARGUMENTS, Append, pack_into, why_not

OVERRIDE_VARIABLE = "FLASHMOE_CUDA_APPEND"
_CHOICES = ("composed", "fused")
_DEFAULT = "fused"
WARPS = 4
"""Of a block; each takes a row of a head."""


def is_asked_for() -> bool:
    """Raises InputError for a value of the variable that says nothing."""
    return asked_for(OVERRIDE_VARIABLE, _CHOICES, _DEFAULT) == "fused"


def takes(append: Append) -> bool:
    """Whether there is a kernel for a call on this device."""
    architecture = device_of(append.key.device.index).architecture
    dtypes = element_types(architecture)
    return why_not(append, dtypes) is None


def kernel(dtype: torch.dtype, architecture: str) -> CudaKernel:
    return CudaKernel(
        source="paged_append.cu",
        function="paged_append",
        architecture=architecture,
        macros={
            "ELEMENT_BF16": int(dtype == torch.bfloat16),
            "MMA_K": 8 if architecture == "sm_75" else 16,
            "NATIVE_REDUX": 0,
        },
        threads_per_block=32 * WARPS,
        dynamic_shared_bytes=0,
    )


def kernels(architecture: str) -> list[CudaKernel]:
    """What is built ahead of time: all."""
    dtypes = element_types(architecture)
    return [kernel(dtype, architecture) for dtype in dtypes]


class _OfThread(threading.local):
    """Launchers have a buffer that is read during the launch, so each thread has its own."""

    def __init__(self) -> None:
        self.launchers: dict[tuple[int, torch.dtype], Launcher] = {}


_own = _OfThread()


def run(append: Append, query_out: torch.Tensor | None) -> None:
    """One launch on the current stream, of a call that `takes` is true for.

    Args:
        query_out: (tokens, heads, head_dim), contiguous; None where nothing is done to a query.
    """
    index, dtype = append.key.device.index, append.key.dtype
    if current_device() != index:
        with torch.cuda.device(index):
            run(append, query_out)
        return
    launcher = _own.launchers.get((index, dtype))
    if launcher is None:
        make_context_current(index)
        device = device_of(index)
        compiled = kernel(dtype, device.architecture)
        # One that spills is still right, and faster than the operations in its place.
        launcher = loaded(compiled, device, (1, 1, 1), ARGUMENTS.size, allow_defects=True)
        _own.launchers[index, dtype] = launcher
    pack_into(launcher.buffer, append, query_out)
    launcher.config.grid[0] = -(-append.rows // WARPS)
    launcher.start(raw_stream(index))
