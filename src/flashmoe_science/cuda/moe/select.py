"""Which way a mixture-of-experts call takes: the one place where that is decided. From its shapes alone."""

from __future__ import annotations

from flashmoe_science.configs.moe import few as few_configs
from flashmoe_science.configs.moe import hopper as hopper_configs
from flashmoe_science.configs.moe import portable as portable_configs
from flashmoe_science.configs.moe.few import FewConfiguration, FewWay
from flashmoe_science.configs.moe.hopper import MoeHopperConfiguration
from flashmoe_science.configs.moe.portable import PortableMoeConfiguration
from flashmoe_science.cuda.choice import DTYPE_NAMES, KernelModule, Selection, Tuned
from flashmoe_science.cuda.moe import few, hopper, portable, routing_losses, topk
from flashmoe_science.cuda.moe.problem import MoeKind, MoeProblem
from flashmoe_science.jit.nvrtc import CudaKernel

OVERRIDE_VARIABLE = "FLASHMOE_MOE_KERNEL"


def _describe(problem: MoeProblem) -> str:
    return (
        f"{problem.dtype} with {problem.experts} experts, hidden size {problem.hidden} and intermediate size "
        f"{problem.intermediate}"
    )


def fields(problem: MoeProblem) -> dict[str, int | bool | str]:
    """A problem by the names that regions of tuned configurations use: those of the lab's cases."""
    told: dict[str, int | bool | str] = {
        "dtype": DTYPE_NAMES[problem.dtype],
        "tokens": problem.tokens,
        "hidden": problem.hidden,
        "intermediate": problem.intermediate,
        "experts": problem.experts,
        "top_k": problem.top_k,
        "activation": problem.activation.value,
        # Of no quantised weights, which no kernel here takes; a case of the lab has these too, and a region names them.
        "weight_bits": 0,
        "group": 0,
        "w13_layout": problem.w13_layout.value,
    }
    # A case has both biases or none: with one alone no region fits.
    if problem.w13_biased == problem.w2_biased:
        told["bias"] = problem.w13_biased
    return told


TUNED = Tuned[MoeProblem](
    operation="moe",
    configurations={
        MoeKind.FEW: FewConfiguration,
        MoeKind.HOPPER: MoeHopperConfiguration,
        MoeKind.PORTABLE: PortableMoeConfiguration,
    },
    tunable={
        MoeKind.FEW: few_configs.TUNABLE,
        MoeKind.HOPPER: hopper_configs.TUNABLE,
        MoeKind.PORTABLE: portable_configs.TUNABLE,
    },
    sources={
        MoeKind.FEW: tuple(f"moe_few_{way.value}.cu" for way in FewWay),
        MoeKind.HOPPER: ("moe_hopper.cu",),
        MoeKind.PORTABLE: ("moe_portable.cu",),
    },
    fields=fields,
)

FORWARD = Selection[MoeProblem](
    modules={MoeKind.FEW: few, MoeKind.HOPPER: hopper, MoeKind.PORTABLE: portable},
    override_variable=OVERRIDE_VARIABLE,
    noun="mixture-of-experts kernel",
    describe=_describe,
    instead="torch.nn.functional.grouped_mm",
    tuned=TUNED,
)
select, plan = FORWARD.select, FORWARD.plan


def module(kind: MoeKind) -> KernelModule[MoeProblem]:
    return FORWARD.modules[kind]


def kernels(architecture: str) -> list[CudaKernel]:
    """Everything that a call could take on an architecture, and the router's kernels."""
    return [
        *FORWARD.kernels(architecture),
        *topk.kernels(architecture),
        *routing_losses.kernels(architecture),
    ]
