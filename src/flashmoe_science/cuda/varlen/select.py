"""Which kernel takes a call of attention over sequences of any lengths: the one place where that is decided."""

from __future__ import annotations

import os
from enum import Enum
from typing import Protocol

from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.varlen import decode, portable
from flashmoe_science.errors import InputError, NoKernelError
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.varlen.problem import Problem, Run

OVERRIDE_VARIABLE = "FLASHMOE_CUDA_VARLEN"


class VarlenKernel(Enum):
    """The kernels."""

    DECODE = "decode"
    PORTABLE = "portable"


class KernelModule(Protocol):
    """What the module of one kernel provides. ``most_queries``: no sequence of a call has more, by `bucket`."""

    def why_not(self, problem: Problem, device: Device, most_queries: int) -> str | None:
        """Why it cannot or should not take such calls, as the end of a sentence about it; None if it takes them."""
        ...

    def prepare(self, problem: Problem, device: Device, most_queries: int) -> Run:
        """What makes them. The device is current."""
        ...

    def kernels(self, architecture: str) -> list[CudaKernel]:
        """What is built ahead of time."""
        ...


MODULES: dict[VarlenKernel, KernelModule] = {VarlenKernel.DECODE: decode, VarlenKernel.PORTABLE: portable}
"""In order of preference: the first that takes a call gets it."""


def bucket(max_seqlen_q: int) -> int:
    """The power of two, less one, that no sequence of such a call exceeds: all of a length that plans know."""
    return (1 << max_seqlen_q.bit_length()) - 1


def select(problem: Problem, device: Device, most_queries: int) -> VarlenKernel:
    """The kernel for calls of a problem.

    Raises:
        InputError: the override variable names no kernel.
        NoKernelError: no kernel takes the problem, or not the one that it names.
    """
    named = os.environ.get(OVERRIDE_VARIABLE)
    names = {kind.value: kind for kind in MODULES}
    if named and named not in names:
        raise InputError(f"{OVERRIDE_VARIABLE}={named!r} names no kernel; expected one of {', '.join(names)}")
    refusals = []
    for kind in [names[named]] if named else MODULES:
        reason = MODULES[kind].why_not(problem, device, most_queries)
        if reason is None:
            return kind
        refusals.append(f"{kind.value}: {reason}")
    raise NoKernelError(f"no CUDA kernel takes this call of attention_varlen ({'; '.join(refusals)})")


def kernels(architecture: str) -> list[CudaKernel]:
    """What is built ahead of time."""
    return [kernel for module in MODULES.values() for kernel in module.kernels(architecture)]
