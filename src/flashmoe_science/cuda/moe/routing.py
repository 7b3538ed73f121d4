"""Routing: slots sorted by expert (`kernels/cuda/moe_count.cu`, `moe_place.cu`). On any architecture."""

from __future__ import annotations

import struct

from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.launch import Launcher, loaded
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import limits, overlaps
from flashmoe_science.jit.nvrtc import CudaKernel

_POINTERS = struct.Struct("5Q")
_REST = struct.Struct("2i")
_ARGUMENT_BYTES = 64
_WARPS = (32, 16, 8, 4, 2, 1)
_STATIC_SHARED = 9216  # more than the kernels declare
_CHUNK = 2048  # slots of a block, where there are several
_SINGLE = 8192  # slots up to which one block is faster than two launches
_INT = 4
_LEAST_CAPACITY = 128
TICKETS_BYTES = 32
"""Eight int32 counters that routing sets to zero, for the products after it."""


def capacity_for(experts: int) -> int:
    """Experts that the kernel has room to count: few sizes serve all numbers."""
    return max(_LEAST_CAPACITY, 1 << (experts - 1).bit_length())


def most_experts(architecture: str) -> int:
    """How many a block of one warp has room to count."""
    return 1 << (((limits(architecture).shared_per_block - _STATIC_SHARED) // _INT).bit_length() - 1)


def warps_for(capacity: int, architecture: str) -> int:
    """Warps of a block: as many as have room for a count of each expert."""
    room = limits(architecture).shared_per_block - _STATIC_SHARED
    return next(warps for warps in _WARPS if warps * capacity * _INT <= room)


def kernel(function: str, capacity: int, chunk: int, ids64: bool, architecture: str) -> CudaKernel:
    """``moe_count`` or ``moe_place`` for `chunk` slots a block and up to `capacity` experts, at most `most_experts`."""
    warps = warps_for(capacity, architecture)
    return CudaKernel(
        source=f"{function}.cu",
        function=function,
        architecture=architecture,
        macros={
            "CAPACITY": capacity,
            "WARPS": warps,
            "LOADS": chunk // (32 * warps),
            "IDS64": int(ids64),
            "DEPENDENT": int(overlaps(architecture)),
        },
        threads_per_block=32 * warps,
        dynamic_shared_bytes=(warps if function == "moe_place" else 1) * capacity * _INT,
    )


def step_kernels(architecture: str) -> list[CudaKernel]:
    """Both kernels, for up to 512 experts; a way through experts that takes this step lists them among its own."""
    return [
        kernel(function, capacity, chunk, ids64, architecture)
        for function, chunk in (("moe_count", _CHUNK), ("moe_place", _CHUNK), ("moe_place", _SINGLE))
        for capacity in (128, 256, 512)
        for ids64 in (False, True)
    ]


class Routing:
    """The launches of routing, of which only addresses are missing.

    Writes `expert_offsets` (experts + 1, int32): where each expert's slots begin; the last is the number of valid ids.
    `sorted_slots` (slots, int32): slot = token * top_k + j, by expert, ascending within an expert. And eight int32
    `tickets`: zero.
    """

    __slots__ = ("_count", "_place", "counts_bytes", "offsets_bytes", "slots_bytes")

    def __init__(self, problem: MoeProblem, device: Device, architecture: str) -> None:
        """
        Args:
            architecture: what to compile for, e.g. ``sm_90a`` or ``sm_80``; the device is current.

        Raises:
            InputError: more experts than `most_experts`.
        """
        if problem.experts > most_experts(architecture):
            raise InputError(
                f"{problem.experts} experts are more than routing counts; "
                f"expected at most {most_experts(architecture)}"
            )
        capacity = capacity_for(problem.experts)
        chunk = _SINGLE if _CHUNK < problem.slots <= _SINGLE else _CHUNK
        blocks = max(1, -(-problem.slots // chunk))
        self.offsets_bytes = (problem.experts + 1) * _INT
        self.slots_bytes = problem.slots * _INT
        self.counts_bytes = blocks * problem.experts * _INT if blocks > 1 else 0
        """Of `counts`, which hold nothing of use afterwards."""
        dependent = overlaps(architecture)

        def prepare(function: str) -> Launcher:
            compiled = kernel(function, capacity, chunk, problem.ids64, architecture)
            launcher = loaded(compiled, device, (blocks, 1, 1), _ARGUMENT_BYTES, dependent=dependent)
            _REST.pack_into(launcher.buffer, _POINTERS.size, problem.slots, problem.experts)
            return launcher

        self._count = prepare("moe_count") if blocks > 1 else None
        self._place = prepare("moe_place")

    def launch(
        self, topk_ids: int, expert_offsets: int, sorted_slots: int, counts: int, tickets: int, stream: int
    ) -> None:
        if self._count is not None:
            _POINTERS.pack_into(
                self._count.buffer, 0, topk_ids, expert_offsets, sorted_slots, counts, tickets
            )
            self._count.start(stream)
        _POINTERS.pack_into(self._place.buffer, 0, topk_ids, expert_offsets, sorted_slots, counts, tickets)
        self._place.start(stream)
