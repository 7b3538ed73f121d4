"""The CUDA backend: choose a kernel and its configuration, compile it if need be, launch it.

A folder an operation (`attention`, `moe`); what they share stands beside them.
"""

from flashmoe_science.cuda.build import build, kernels

__all__ = ["build", "kernels"]
