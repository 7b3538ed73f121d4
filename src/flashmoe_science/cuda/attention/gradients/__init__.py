"""The backward pass of attention on CUDA.

A call goes `backward` -> a launch plan, cached per shape -> the driver. Plans are made by `select` (which kernel) and
the kernel's own module (`short`, `hopper`, `two_pass`, `portable`). `cuda.choice.KernelModule` says how to add
one; its kind is a member of `GradientKind`.
"""

from flashmoe_science.cuda.attention.gradients.backward import backward, explain
from flashmoe_science.cuda.attention.gradients.problem import BackwardProblem, GradientKind
from flashmoe_science.cuda.attention.gradients.select import OVERRIDE_VARIABLE, kernels, select

__all__ = ["OVERRIDE_VARIABLE", "BackwardProblem", "GradientKind", "backward", "explain", "kernels", "select"]
