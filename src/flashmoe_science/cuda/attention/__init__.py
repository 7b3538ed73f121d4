"""Attention on CUDA.

A call goes `forward` -> a launch plan, cached per shape -> the driver. Plans are made by `select` (which
kernel) and the kernel's own module (`small`, `hopper`, `portable`). To add a kernel: a module with the functions of
`problem.KernelModule`, a member of `KernelKind`, and a line in `select`.
"""

from flashmoe_science.cuda.attention.forward import explain, forward
from flashmoe_science.cuda.attention.problem import Choice, KernelKind, LaunchPlan, Problem
from flashmoe_science.cuda.attention.select import OVERRIDE_VARIABLE, compiled, select

__all__ = [
    "OVERRIDE_VARIABLE",
    "Choice",
    "KernelKind",
    "LaunchPlan",
    "Problem",
    "compiled",
    "explain",
    "forward",
    "select",
]
