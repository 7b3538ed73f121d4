"""Which kernel takes a call of attention over sequences of any lengths: the one place where that is decided."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Protocol

from flashmoe_science.cuda.choice import Choice, Refusal, not_preferred
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.varlen import decode, decode_hopper, hopper, mixed_hopper, portable
from flashmoe_science.cuda.varlen.decode_calls import MOST_QUERIES
from flashmoe_science.cuda.varlen.kind import VarlenKernel, bucket
from flashmoe_science.errors import InputError, NoKernelError
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.varlen import dequantized
from flashmoe_science.varlen.problem import Only, Problem, Run, Sizes

OVERRIDE_VARIABLE = "FLASHMOE_CUDA_VARLEN"


class KernelModule(Protocol):
    """What the module of one kernel provides. ``most_queries``: no sequence of a call has more, by `kind.bucket`."""

    def why_not(self, problem: Problem, device: Device, most_queries: int) -> str | None:
        """Why it cannot or should not take calls of a problem, as the end of a sentence about it; None if it does.

        Args:
            most_queries: no sequence of a call has more; see `kind.bucket`.
        """
        ...

    def prepare(self, problem: Problem, device: Device, most_queries: int) -> Run:
        """What makes them. The device is current."""
        ...

    def choose(self, problem: Problem, device: Device, sizes: Sizes, tokens: int) -> Choice:
        """The configuration of a call that it takes, as what `prepare` made has it.

        Args:
            tokens: query rows of all sequences.
        """
        ...

    def kernels(self, architecture: str) -> list[CudaKernel]:
        """What is built ahead of time."""
        ...


MODULES: dict[VarlenKernel, KernelModule] = {
    VarlenKernel.DECODE: decode,
    VarlenKernel.DECODE_HOPPER: decode_hopper,
    VarlenKernel.HOPPER: hopper,
    VarlenKernel.MIXED_HOPPER: mixed_hopper,
    VarlenKernel.PORTABLE: portable,
}
"""In order of preference, but for the two that decode: the first that takes a call gets it. The one for prompts beside
decode steps gets calls for which it is faster.
"""


def select(problem: Problem, device: Device, sizes: Sizes, tokens: int) -> VarlenKernel:
    """The kernel for a call. Raises as `candidates` does."""
    return candidates(problem, device, sizes, tokens)[0]


def like(problem: Problem, device: Device, sizes: Sizes, tokens: int) -> tuple[int, bool]:
    """All that `candidates` depends on of a call's sizes: most queries of a sequence, by `kind.bucket`, and whether the
    Hopper kernel for few queries, or for prompts beside them, is faster than the one that is preferred else.
    """
    faster = decode_hopper.is_faster(problem, sizes, device) or mixed_hopper.is_faster(problem, sizes, tokens)
    return bucket(sizes.max_seqlen_q), faster


def candidates(problem: Problem, device: Device, sizes: Sizes, tokens: int) -> list[VarlenKernel]:
    """The kernels that take a call, the preferred one first: at least one.

    Args:
        tokens: query rows of all sequences.

    Raises:
        InputError: the override variable names no kernel.
        NoKernelError: no kernel takes the problem, or not the one that it names.
    """
    named = os.environ.get(OVERRIDE_VARIABLE)
    most_queries, faster = like(problem, device, sizes, tokens)
    names = {kind.value: kind for kind in MODULES}
    if named and named not in names:
        raise InputError(f"{OVERRIDE_VARIABLE}={named!r} names no kernel; expected one of {', '.join(names)}")
    is_few = sizes.max_seqlen_q <= MOST_QUERIES
    order = [kind for kind in MODULES if kind is not VarlenKernel.MIXED_HOPPER or (faster and not is_few)]
    if faster:
        first = VarlenKernel.DECODE_HOPPER if is_few else VarlenKernel.MIXED_HOPPER
        order.sort(key=lambda kind: kind is not first)
    reasons = {
        kind: MODULES[kind].why_not(problem, device, most_queries)
        for kind in ([names[named]] if named else order)
    }
    taking = [kind for kind, reason in reasons.items() if reason is None]
    if not taking:
        refusals = "; ".join(f"{kind.value}: {reason}" for kind, reason in reasons.items())
        raise NoKernelError(f"no CUDA kernel takes this call of attention_varlen ({refusals})")
    return taking


def launched(problem: Problem, device: Device, most_queries: int) -> Problem:
    """The problem of the launch that ``most_queries``, a call's `kind.bucket`, decides.

    With `split_keys` a sequence of one token has the same kernel in all batches, machine code included: if one for few
    queries takes it, that is compiled for such sequences alone, and is a launch of its own in calls with longer ones.
    """
    named = os.environ.get(OVERRIDE_VARIABLE)
    for_few = [
        kind for kind in (VarlenKernel.DECODE, VarlenKernel.DECODE_HOPPER) if named in (None, "", kind.value)
    ]
    if not problem.split_keys or all(MODULES[kind].why_not(problem, device, 1) for kind in for_few):
        return problem  # else by the kernel, and the tile, of any prompt
    return replace(problem, only=Only.OTHERS if most_queries > 1 else Only.ONE_TOKEN)


def is_widened(problem: Problem, device: Device, most_queries: int) -> bool:
    """Whether a cache of FP8 is widened in memory before a kernel reads it: `decode` alone reads one."""
    return problem.quantized is not None and decode.why_not(problem, device, most_queries) is not None


def explained(
    problem: Problem, device: Device, sizes: Sizes, tokens: int
) -> tuple[Choice, tuple[Refusal, ...]]:
    """The kernel and configuration of a call, and why each other kernel does not take it. Raises as `candidates` does.

    Args:
        tokens: query rows of all sequences.
    """
    most_queries = bucket(sizes.max_seqlen_q)
    problem = launched(problem, device, most_queries)
    reason = ", and one launch more for sequences of one token" if problem.only is Only.OTHERS else ""
    if is_widened(problem, device, most_queries):
        problem = dequantized.widened(problem, problem.dtype)
        reason = ", over a copy of the cache in 16 bits" + reason
    kind = select(problem, device, sizes, tokens)
    choice = MODULES[kind].choose(problem, device, sizes, tokens)
    named = os.environ.get(OVERRIDE_VARIABLE)
    refusals = tuple(
        Refusal(
            other,
            f"{OVERRIDE_VARIABLE} asks for another"
            if named
            else module.why_not(problem, device, most_queries) or not_preferred(kind),
        )
        for other, module in MODULES.items()
        if other is not kind
    )
    return replace(choice, reason=choice.reason + reason), refusals


def kernels(architecture: str) -> list[CudaKernel]:
    """What is built ahead of time."""
    return [kernel for module in MODULES.values() for kernel in module.kernels(architecture)]
