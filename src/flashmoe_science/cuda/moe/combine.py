"""Combination: the weighted sum of a token's experts (`kernels/cuda/moe_combine.cu`). On any architecture."""

from __future__ import annotations

import struct

import torch

from flashmoe_science.cuda.device import Device, element_types
from flashmoe_science.cuda.launch import loaded
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.jit.limits import limits, overlaps
from flashmoe_science.jit.nvrtc import CudaKernel

_POINTERS = struct.Struct("4Q")
_REST = struct.Struct("3i")
_ARGUMENT_BYTES = 64
_THREADS = 256
_CHUNK = 8  # elements of 16 bits that a thread sums


def kernel(dtype: torch.dtype, ids64: bool, architecture: str, *, weighted: bool = True) -> CudaKernel:
    return CudaKernel(
        source="moe_combine.cu",
        function="moe_combine",
        architecture=architecture,
        macros={
            "ELEMENT_BF16": int(dtype == torch.bfloat16),
            "IDS64": int(ids64),
            "WEIGHTED": int(weighted),
            "DEPENDENT": int(overlaps(architecture)),
            "MMA_K": 16 if limits(architecture).cp_async else 8,
        },
        threads_per_block=_THREADS,
        dynamic_shared_bytes=0,
    )


def step_kernels(architecture: str) -> list[CudaKernel]:
    """A way through experts that takes this step lists them among its own."""
    dtypes = element_types(architecture)
    return [kernel(dtype, ids64, architecture) for dtype in dtypes for ids64 in (False, True)]


class Combine:
    """The launch of the combination, of which only addresses are missing.

    Reads `rows` (slots, hidden), of which those with invalid ids may hold anything; adds a token's in the order of its
    slots, in float32; times their weights if `weighted`.
    """

    __slots__ = ("_launcher",)

    def __init__(
        self, problem: MoeProblem, device: Device, architecture: str, *, weighted: bool = True
    ) -> None:
        """`architecture`: what to compile for, e.g. ``sm_90a`` or ``sm_80``; the device is current."""
        compiled = kernel(problem.dtype, problem.ids64, architecture, weighted=weighted)
        chunks = problem.hidden // _CHUNK
        self._launcher = loaded(
            compiled,
            device,
            (problem.tokens, -(-chunks // _THREADS), 1),
            _ARGUMENT_BYTES,
            dependent=overlaps(architecture),
        )
        _REST.pack_into(self._launcher.buffer, _POINTERS.size, chunks, problem.top_k, problem.experts)

    def launch(self, rows: int, topk_weights: int, topk_ids: int, output: int, stream: int) -> None:
        _POINTERS.pack_into(self._launcher.buffer, 0, rows, topk_weights, topk_ids, output)
        self._launcher.start(stream)
