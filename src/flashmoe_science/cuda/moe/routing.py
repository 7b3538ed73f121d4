"""Routing: slots sorted by expert (`kernels/cuda/moe_count.cu`, `moe_place.cu`). On any architecture."""

from __future__ import annotations

import struct

import torch

from flashmoe_science.cuda.driver import Launcher, load
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.cuda.problem import Device
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import base_architecture, limits
from flashmoe_science.jit.nvrtc import CudaKernel

_POINTERS = struct.Struct("5Q")
_REST = struct.Struct("2i")
_ARGUMENT_BYTES = 64
_LOADS = 8  # slots of a thread, as in moe/routing.cuh
_WARPS = (32, 16, 8, 4, 2, 1)
_STATIC_SHARED = 256  # more than the kernels declare
_INT = 4
TICKETS_BYTES = 8
"""Two int32 counters that routing sets to zero, for the products after it."""


def warps_for(experts: int, architecture: str) -> int:
    """Warps of a block: as many as have room for a count of each expert.

    Raises:
        InputError: there is not even room for one.
    """
    room = limits(architecture).shared_per_block - _STATIC_SHARED
    found = next((warps for warps in _WARPS if warps * experts * _INT <= room), None)
    if found is None:
        raise InputError(f"{experts} experts are more than routing counts; expected at most {room // _INT}")
    return found


def kernel(function: str, problem: MoeProblem, architecture: str) -> CudaKernel:
    warps = warps_for(problem.experts, architecture)
    return _kernel(function, warps, problem.experts, problem.ids64, architecture)


def _kernel(function: str, warps: int, experts: int, ids64: bool, architecture: str) -> CudaKernel:
    rows = warps if function == "moe_place" else 1
    return CudaKernel(
        source=f"{function}.cu",
        function=function,
        architecture=architecture,
        macros={"WARPS": warps, "IDS64": int(ids64), "DEPENDENT": int(overlaps(architecture))},
        threads_per_block=32 * warps,
        dynamic_shared_bytes=rows * experts * _INT,
    )


def overlaps(architecture: str) -> bool:
    """Whether a kernel may start while the one before it still runs: programmatic dependent launch, since sm_90."""
    return int(base_architecture(architecture).removeprefix("sm_")) >= 90


def kernels(architecture: str) -> list[CudaKernel]:
    """Both kernels, as up to 512 experts take them or nearly so."""
    experts = min(512, (limits(architecture).shared_per_block - _STATIC_SHARED) // (_WARPS[0] * _INT))
    return [
        _kernel(function, _WARPS[0], experts, ids64, architecture)
        for function in ("moe_count", "moe_place")
        for ids64 in (False, True)
    ]


class Routing:
    """The launches of routing, of which only addresses are missing.

    Writes `expert_offsets` (experts + 1, int32): where each expert's slots begin; the last is the number of valid ids.
    `sorted_slots` (slots, int32): slot = token * top_k + j, by expert, ascending within an expert. And two int32
    `tickets`: zero.
    """

    __slots__ = ("_count", "_place", "counts_bytes", "offsets_bytes", "slots_bytes")

    def __init__(self, problem: MoeProblem, device: Device, architecture: str) -> None:
        """`architecture`: what to compile for, e.g. ``sm_90a`` or ``sm_80``; the device is current."""
        warps = warps_for(problem.experts, architecture)
        blocks = max(1, -(-problem.slots // (32 * warps * _LOADS)))
        self.offsets_bytes = (problem.experts + 1) * _INT
        self.slots_bytes = problem.slots * _INT
        self.counts_bytes = blocks * problem.experts * _INT if blocks > 1 else 0
        """Of `counts`, which hold nothing of use afterwards."""
        dependent = overlaps(architecture)
        capturing = torch.cuda.is_current_stream_capturing()

        def prepare(function: str) -> Launcher:
            compiled = kernel(function, problem, architecture)
            loaded = load(compiled, device.index, capturing)
            launcher = Launcher(loaded, (blocks, 1, 1), compiled, _ARGUMENT_BYTES, dependent=dependent)
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
