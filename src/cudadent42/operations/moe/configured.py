"""Which way and configuration this project's mixture of experts, or a variant of it, takes for a case, and what it
compiles."""

from __future__ import annotations

import torch
from torch import Tensor

from cudadent42.model.dtypes import DTYPES
from cudadent42.model.implementations import NOT_DONE, UnsupportedCaseError
from cudadent42.operations.interface import Configured
from cudadent42.operations.moe.case import MoeCase
from cudadent42.operations.moe.implementations import variant_choice, variants_of
from cudadent42.operations.variants import chosen
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.moe import MoeKind, few, hopper, portable
from flashmoe_science.cuda.moe.forward import FIVE, asked
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.cuda.moe.select import FORWARD
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.moe_arguments import Activation, W13Layout


def configured(name: str, case: MoeCase, device: Device) -> Configured:
    """As `Definition.configured`."""

    def tensor(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=DTYPES[case.dtype], device="meta")

    columns = case.intermediate * (2 if case.gated else 1)
    tensors = (
        tensor(case.tokens, case.hidden),
        tensor(case.experts, columns, case.hidden),
        tensor(case.experts, case.hidden, case.intermediate),
        torch.empty(case.tokens, case.top_k, dtype=torch.float32, device="meta"),
        torch.empty(case.tokens, case.top_k, dtype=torch.int32, device="meta"),
    )
    try:
        names = (*FIVE, "w13_bias", "w2_bias") if case.bias else FIVE
        problem, _ = asked(tensors, Activation(case.activation), W13Layout(case.w13_layout), device, names)
        choice = chosen(name, variants_of(), variant_choice, FORWARD, problem, device)
    except NOT_DONE as error:
        raise UnsupportedCaseError(str(error)) from error
    return Configured(choice, _kernels(choice, problem, device))


def _kernels(choice: Choice, problem: MoeProblem, device: Device) -> tuple[CudaKernel, ...]:
    """Both products; sorting and combining depend on no configuration."""
    tile, dtype, architecture = choice.configuration, problem.dtype, device.architecture
    if choice.kernel is MoeKind.HOPPER:
        return (hopper.kernel(tile, problem.activation, dtype), hopper.kernel(tile, None, dtype))
    if choice.kernel is MoeKind.PORTABLE:
        return (
            portable.kernel(tile.up, portable.Product.UP, problem.activation, dtype, architecture),
            portable.kernel(tile.down, portable.Product.DOWN, problem.activation, dtype, architecture),
        )
    return tuple(
        few.kernel(tile, product, problem.activation, dtype, architecture)
        for product in (few.Product.UP, few.Product.DOWN)
    )
