"""The backward pass of attention on CUDA.

A call goes `backward` -> a launch plan, cached per shape -> the driver. Plans are made by `select` (which kernel) and
the kernel's own module (`hopper`, `two_pass`, `portable`). To add a kernel: a module with the functions of
`cuda.choice.KernelModule`, a member of `GradientKind`, and a line in `select`.
"""

from flashmoe_science.cuda.attention.gradients.backward import backward, explain
from flashmoe_science.cuda.attention.gradients.problem import BackwardProblem, GradientKind
from flashmoe_science.cuda.attention.gradients.select import OVERRIDE_VARIABLE, kernels, select

__all__ = ["OVERRIDE_VARIABLE", "BackwardProblem", "GradientKind", "backward", "explain", "kernels", "select"]
