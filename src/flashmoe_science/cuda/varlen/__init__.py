"""Attention over sequences of any lengths on CUDA.

A call goes `prepare` -> `select` (which kernel, by how many queries a sequence has at most) -> that kernel's module,
which makes it ready once -> a launch. To add a kernel: a module with the functions of `select.KernelModule`, a member
of `VarlenKernel`, and a line of `MODULES`.
"""

from flashmoe_science.cuda.varlen.kind import VarlenKernel
from flashmoe_science.cuda.varlen.prepare import prepare
from flashmoe_science.cuda.varlen.select import OVERRIDE_VARIABLE, kernels, select

__all__ = ["OVERRIDE_VARIABLE", "VarlenKernel", "kernels", "prepare", "select"]
