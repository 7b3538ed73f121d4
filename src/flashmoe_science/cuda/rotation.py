"""Queries and keys rotated by their positions (`kernels/cuda/rotate.cu`): one launch for both."""

from __future__ import annotations

import struct
from typing import Any

import torch

from flashmoe_science.cuda.calls import Calls, Options, Tensors
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.launch import LaunchPlan, addressed, loaded
from flashmoe_science.cuda.repeat import Call, Layout, cuda_allocator, prepare
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import limits, overlaps
from flashmoe_science.jit.nvrtc import CudaKernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VECTOR_BYTES = 16
"""At a multiple of which rows, and both halves of a row, begin."""
THREADS = 128
GROUP = 4
"""Heads of a thread: what is read of a token's cosines and sines serves all of them."""
_MOST_THREADS = 1 << 31
_ADDRESSES = struct.Struct("6Q")
_REST = struct.Struct("17q 7i")
ARGUMENT_BYTES = _ADDRESSES.size + _REST.size


def rotate(
    query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`operators.rotation.ROTATE` for tensors on a GPU; nothing is synchronised.

    Raises:
        InputError: what `why_not` says, an address that is no multiple of 16 bytes, bfloat16 on a GPU before sm_80.
        DeviceError, BuildError: see `flashmoe_science.cuda.driver.load`.
    """
    rotated: tuple[torch.Tensor, torch.Tensor] = _calls((query, key, cosine, sine), (inverse,))
    return rotated


def why_not(query: torch.Tensor, key: torch.Tensor) -> str | None:
    """Why the kernel does not take tensors that `operators.rotation.check` accepts; None if it does. Tables that it
    cannot read where they lie are to be `readable`.
    """
    if query.dtype not in DTYPES:
        return "another dtype"
    lanes = VECTOR_BYTES // query.element_size()
    if query.shape[3] % (2 * lanes) != 0:
        return f"head_dim no multiple of {2 * lanes}"
    if query.numel() == 0 or key.numel() == 0:
        return "an empty tensor"
    for tensor in (query, key):
        reason = _why_not_rows(tensor, lanes)
        if reason is not None:
            return reason
    if threads_of(query, key) >= _MOST_THREADS:
        return "too many tokens"
    return None


def _why_not_rows(tensor: torch.Tensor, lanes: int) -> str | None:
    *strides, last = tensor.stride()
    if last != 1:
        return "rows not contiguous"
    for size, stride in zip(tensor.shape, strides, strict=False):
        if size > 1 and stride % lanes != 0:
            return f"rows not aligned to {VECTOR_BYTES} bytes"
    return None


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it if the kernel cannot read its rows where they lie: a gradient may lie anyhow, and
    GPT-OSS's tables in some versions of transformers.
    """
    lanes = VECTOR_BYTES // tensor.element_size()
    if _why_not_rows(tensor, lanes) is None and tensor.data_ptr() % VECTOR_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def threads_of(query: torch.Tensor, key: torch.Tensor) -> int:
    """One for each vector of half a head, group of heads, and token."""
    batch, heads, tokens, head_dim = query.shape
    vectors = head_dim * query.element_size() // (2 * VECTOR_BYTES)
    return batch * tokens * -(-(heads + key.shape[1]) // GROUP) * vectors


def kernel(dtype: torch.dtype, architecture: str) -> CudaKernel:
    return CudaKernel(
        source="rotate.cu",
        function="rotate",
        architecture=architecture,
        macros={
            "ELEMENT_BITS": 8 * dtype.itemsize,
            "ELEMENT_BF16": int(dtype == torch.bfloat16),
            "MMA_K": 16 if limits(architecture).bfloat16 else 8,
            "GROUP": GROUP,
            "THREADS": THREADS,
            "DEPENDENT": int(overlaps(architecture)),
        },
        threads_per_block=THREADS,
        dynamic_shared_bytes=0,
    )


def kernels(architecture: str) -> list[CudaKernel]:
    """See `cuda.choice.KernelModule`."""
    return [
        kernel(dtype, architecture)
        for dtype in DTYPES
        if dtype != torch.bfloat16 or limits(architecture).bfloat16
    ]


def results_of(query: torch.Tensor, key: torch.Tensor) -> list[Layout]:
    """Like the tensors: where their elements lie without gaps, in the same order."""
    return [
        Layout(tuple(each.shape), torch.empty_like(each, device="meta").stride(), each.dtype)
        for each in (query, key)
    ]


def write_arguments(buffer: Any, tensors: Tensors, results: list[Layout], inverse: bool) -> None:
    """All fields of the kernel's `RotateParameters` but the addresses."""
    query, key, cosine, sine = tensors
    size = query.element_size()
    of_heads = [
        stride * size
        for each, result in zip((query, key), results, strict=True)
        for stride in (*each.stride()[:3], *result.strides[:3])
    ]
    of_tables = [
        stride * size
        for table in (cosine, sine)
        for stride in (table.stride(0) if table.shape[0] > 1 else 0, table.stride(1))
    ]
    head_dim = query.shape[3]
    half = head_dim // 2 * size
    _REST.pack_into(
        buffer,
        _ADDRESSES.size,
        *of_heads,
        *of_tables,
        threads_of(query, key),
        query.shape[2],
        query.shape[1],
        query.shape[1] + key.shape[1],
        half // VECTOR_BYTES,
        half,
        half if cosine.shape[2] == head_dim else 0,
        int(inverse),
    )


def _check(tensors: Tensors, options: Options) -> None:
    query, key, *tables = tensors
    lanes = VECTOR_BYTES // query.element_size()
    reason = why_not(query, key) or next(filter(None, (_why_not_rows(each, lanes) for each in tables)), None)
    if reason is not None:
        raise InputError(
            f"the CUDA kernel of rotations does not take this call ({reason}); use PyTorch's operations"
        )


def _make_call(tensors: Tensors, options: Options, index: int) -> Call:
    query, key, _, _ = tensors
    (inverse,) = options
    device = device_of(index)
    if query.dtype == torch.bfloat16 and not limits(device.architecture).bfloat16:
        raise InputError(f"query is bfloat16, which {device.architecture} does not have: use query.float()")
    make_context_current(device.index)
    compiled = kernel(query.dtype, device.architecture)
    blocks = -(-threads_of(query, key) // THREADS)
    dependent = bool(compiled.macros["DEPENDENT"])
    launcher = loaded(compiled, device, (blocks, 1, 1), ARGUMENT_BYTES, dependent=dependent)
    results = results_of(query, key)
    write_arguments(launcher.buffer, tensors, results, inverse)
    inputs = dict.fromkeys(("query", "key", "cosine", "sine"), VECTOR_BYTES)
    return prepare(inputs, results, LaunchPlan(addressed(launcher, _ADDRESSES)), index, cuda_allocator())


_calls = Calls(_check, _make_call, options=1, most=1024, under_no_grad=True)
