"""Which kernel takes a call of attention over sequences of any lengths: the one place where that is decided."""

from __future__ import annotations

import os
from enum import Enum
from typing import Protocol

from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.varlen import decode, hopper, portable
from flashmoe_science.errors import InputError, NoKernelError
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.varlen.problem import Problem, Run

OVERRIDE_VARIABLE = "FLASHMOE_CUDA_VARLEN"


class VarlenKernel(Enum):
    """The kernels."""

    DECODE = "decode"
    HOPPER = "hopper"
    PORTABLE = "portable"


class KernelModule(Protocol):
    """What the module of one kernel provides. ``most_queries``: no sequence of a call has more, by `bucket`."""

    def why_not(self, problem: Problem, device: Device, most_queries: int) -> str | None:
        """Why it cannot or should not take calls of a problem, as the end of a sentence about it; None if it does.

        Args:
            most_queries: no sequence of a call has more; see `bucket`.
        """
        ...

    def prepare(self, problem: Problem, device: Device, most_queries: int) -> Run:
        """What makes them. The device is current."""
        ...

    def kernels(self, architecture: str) -> list[CudaKernel]:
        """What is built ahead of time."""
        ...


MODULES: dict[VarlenKernel, KernelModule] = {
    VarlenKernel.DECODE: decode,
    VarlenKernel.HOPPER: hopper,
    VarlenKernel.PORTABLE: portable,
}
"""In order of preference: the first that takes a call gets it."""


def bucket(max_seqlen_q: int) -> int:
    """The power of two, less one, that no sequence of such a call exceeds: all of a length that plans know."""
    return (1 << max_seqlen_q.bit_length()) - 1


def select(problem: Problem, device: Device, most_queries: int) -> VarlenKernel:
    """The kernel for calls of a problem. Raises as `candidates` does."""
    return candidates(problem, device, most_queries)[0]


def candidates(problem: Problem, device: Device, most_queries: int) -> list[VarlenKernel]:
    """The kernels that take calls of a problem, the preferred one first: at least one.

    Raises:
        InputError: the override variable names no kernel.
        NoKernelError: no kernel takes the problem, or not the one that it names.
    """
    named = os.environ.get(OVERRIDE_VARIABLE)
    names = {kind.value: kind for kind in MODULES}
    if named and named not in names:
        raise InputError(f"{OVERRIDE_VARIABLE}={named!r} names no kernel; expected one of {', '.join(names)}")
    reasons = {
        kind: MODULES[kind].why_not(problem, device, most_queries)
        for kind in ([names[named]] if named else MODULES)
    }
    taking = [kind for kind, reason in reasons.items() if reason is None]
    if not taking:
        refusals = "; ".join(f"{kind.value}: {reason}" for kind, reason in reasons.items())
        raise NoKernelError(f"no CUDA kernel takes this call of attention_varlen ({refusals})")
    return taking


def kernels(architecture: str) -> list[CudaKernel]:
    """What is built ahead of time."""
    return [kernel for module in MODULES.values() for kernel in module.kernels(architecture)]
