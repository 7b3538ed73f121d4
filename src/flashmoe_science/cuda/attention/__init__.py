"""Attention on CUDA.

A call goes `forward` -> a launch plan, cached per shape -> the driver. Plans are made by `select` (which
kernel) and the kernel's own module (`small`, `hopper`, `portable`). `cuda.choice.KernelModule` says how to add
one; its kind is a member of `KernelKind`. The backward pass is built in the same way, in `gradients`.
"""

from flashmoe_science.cuda.attention import gradients
from flashmoe_science.cuda.attention.forward import explain, forward
from flashmoe_science.cuda.attention.gradients import backward
from flashmoe_science.cuda.attention.problem import KernelKind, Problem
from flashmoe_science.cuda.attention.select import OVERRIDE_VARIABLE, compiled, kernels, select
from flashmoe_science.cuda.choice import Choice

__all__ = [
    "OVERRIDE_VARIABLE",
    "Choice",
    "KernelKind",
    "Problem",
    "backward",
    "compiled",
    "explain",
    "forward",
    "gradients",
    "kernels",
    "select",
]
