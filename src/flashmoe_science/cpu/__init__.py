"""The CPU backend: kernels compiled by the machine's C++ compiler at first use. A module an operation."""

from flashmoe_science.cpu.library import KERNELS, build

__all__ = ["KERNELS", "build"]
