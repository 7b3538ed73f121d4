"""Attention over sequences of any lengths on CUDA: kernels, and the choice among them."""

from flashmoe_science.cuda.varlen.prepare import prepare

__all__ = ["prepare"]
