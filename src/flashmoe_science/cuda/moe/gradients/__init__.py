"""The backward pass of a mixture of experts on CUDA, and the forward pass that keeps what it needs.

A call goes `backward` -> a plan, cached per shape -> the driver. Plans are made by `select` and by the module of each
kind. `cuda.choice.KernelModule` says how to add one: a member of `MoeBackwardKind`.
"""

from flashmoe_science.cuda.moe.gradients.backward import (
    backward,
    can_differentiate,
    can_project_again,
    explain,
    why_composed,
    why_no_kernel,
)
from flashmoe_science.cuda.moe.gradients.forward import forward_keeping
from flashmoe_science.cuda.moe.gradients.problem import (
    OVERRIDE_VARIABLE,
    MoeBackwardKind,
    MoeBackwardProblem,
)
from flashmoe_science.cuda.moe.gradients.select import kernels, select

__all__ = [
    "OVERRIDE_VARIABLE",
    "MoeBackwardKind",
    "MoeBackwardProblem",
    "backward",
    "can_differentiate",
    "can_project_again",
    "explain",
    "forward_keeping",
    "kernels",
    "select",
    "why_composed",
    "why_no_kernel",
]
