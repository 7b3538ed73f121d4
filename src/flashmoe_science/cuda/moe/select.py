"""Which way a mixture-of-experts call takes: the one place where that is decided. From its shapes alone."""

from __future__ import annotations

from flashmoe_science.cuda.choice import KernelModule, Selection
from flashmoe_science.cuda.moe import few, hopper, portable, topk
from flashmoe_science.cuda.moe.problem import MoeKind, MoeProblem
from flashmoe_science.jit.nvrtc import CudaKernel

OVERRIDE_VARIABLE = "FLASHMOE_MOE_KERNEL"


def _describe(problem: MoeProblem) -> str:
    return (
        f"{problem.dtype} with {problem.experts} experts, hidden size {problem.hidden} and intermediate size "
        f"{problem.intermediate}"
    )


FORWARD = Selection[MoeProblem](
    modules={MoeKind.FEW: few, MoeKind.HOPPER: hopper, MoeKind.PORTABLE: portable},
    override_variable=OVERRIDE_VARIABLE,
    noun="mixture-of-experts kernel",
    describe=_describe,
    instead="torch.nn.functional.grouped_mm",
)
select, plan = FORWARD.select, FORWARD.plan


def module(kind: MoeKind) -> KernelModule[MoeProblem]:
    return FORWARD.modules[kind]


def kernels(architecture: str) -> list[CudaKernel]:
    """Everything that a call could take on an architecture, and the router's kernel."""
    return FORWARD.kernels(architecture) + topk.kernels(architecture)
