"""Lists of the keys that a mask shows (`kernels/cuda/key_lists.cu`), in one launch.

No GPU has run it yet, so it is asked for: see `OVERRIDE_VARIABLE`. Without that PyTorch's operations do its work.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

from flashmoe_science.cuda.calls import Calls, Options, Tensors
from flashmoe_science.cuda.choice import asked_for
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.launch import LaunchPlan, addressed, loaded
from flashmoe_science.cuda.repeat import Call, Layout, cuda_allocator, prepare
from flashmoe_science.jit.limits import overlaps
from flashmoe_science.jit.nvrtc import CudaKernel

OVERRIDE_VARIABLE = "FLASHMOE_CUDA_KEY_LISTS"
_CHOICES = ("composed", "fused")
SHAPES = ((8, 512), (32, 256))
"""Warps of a block, and keys of a warp in each step: where the first do it in one, and for more keys."""
_ADDRESSES = struct.Struct("4Q")
_REST = struct.Struct("4q 3i 4x")
ARGUMENT_BYTES = _ADDRESSES.size + _REST.size


def is_asked_for() -> bool:
    """Raises InputError for a value of the variable that says nothing."""
    return asked_for(OVERRIDE_VARIABLE, _CHOICES, _CHOICES[0]) == _CHOICES[1]


def key_lists(seen: torch.Tensor, pitch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`operators.key_lists.KEY_LISTS` for a mask on a GPU; nothing is synchronised.

    Raises:
        DeviceError, BuildError: see `flashmoe_science.cuda.driver.load`.
    """
    keys, counts, starts = _calls((seen,), (pitch,))
    return keys, counts, starts


def kernel(seqlen_k: int, architecture: str) -> CudaKernel:
    warps, keys = SHAPES[seqlen_k > math.prod(SHAPES[0])]
    return CudaKernel(
        source="key_lists.cu",
        function="key_lists",
        architecture=architecture,
        macros={
            "WARPS": warps,
            "KEYS": keys,
            "ELEMENT_BF16": 0,
            "MMA_K": 8 if architecture == "sm_75" else 16,
            "DEPENDENT": int(overlaps(architecture)),
        },
        threads_per_block=32 * warps,
        dynamic_shared_bytes=0,
    )


def kernels(architecture: str) -> list[CudaKernel]:
    """See `cuda.choice.KernelModule`."""
    most_at_once = math.prod(SHAPES[0])
    return [kernel(seqlen_k, architecture) for seqlen_k in (most_at_once, most_at_once + 1)]


def write_arguments(buffer: Any, seen: torch.Tensor, pitch: int) -> None:
    """All fields of the kernel's `KeyListsParameters` but the addresses."""
    batch, seqlen_q, seqlen_k = seen.shape
    _REST.pack_into(buffer, _ADDRESSES.size, *seen.stride(), pitch, seqlen_q, seqlen_k, batch * seqlen_q)


def _check(tensors: Tensors, options: Options) -> None:
    """The operator did."""


def _make_call(tensors: Tensors, options: Options, index: int) -> Call:
    (seen,) = tensors
    (pitch,) = options
    batch, seqlen_q, seqlen_k = seen.shape
    rows = batch * seqlen_q
    device = device_of(index)
    make_context_current(device.index)
    compiled = kernel(seqlen_k, device.architecture)
    dependent = bool(compiled.macros["DEPENDENT"])
    launcher = loaded(compiled, device, (rows, 1, 1), ARGUMENT_BYTES, dependent=dependent)
    write_arguments(launcher.buffer, seen, pitch)
    results = [
        Layout((rows, seqlen_k), (seqlen_k, 1), torch.int32),
        Layout((rows,), (1,), torch.int32),
        Layout((rows + 1,), (1,), torch.int32),
    ]
    return prepare({"mask": 1}, results, LaunchPlan(addressed(launcher, _ADDRESSES)), index, cuda_allocator())


_calls = Calls(_check, _make_call, options=1, most=1024, under_no_grad=True)
