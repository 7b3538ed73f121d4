"""Mixture of experts on CUDA: choose a way and its configuration, compile what it needs, launch it.

A call goes `forward` -> a plan, cached per shape -> the driver. Plans are made by `select` and by the module of each
kind; `routing` and `combine` are the steps that kinds share. `cuda.choice.KernelModule`
says how to add one: a member of `MoeKind`.
"""

from flashmoe_science.cuda.moe import gradients
from flashmoe_science.cuda.moe.forward import explain, forward
from flashmoe_science.cuda.moe.problem import MoeKind, MoeProblem
from flashmoe_science.cuda.moe.select import OVERRIDE_VARIABLE, kernels, select

__all__ = [
    "OVERRIDE_VARIABLE",
    "MoeKind",
    "MoeProblem",
    "explain",
    "forward",
    "gradients",
    "kernels",
    "select",
]
