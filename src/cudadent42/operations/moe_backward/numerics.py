"""Inputs of a mixture of experts' backward pass, and what is right for them."""

from __future__ import annotations

from torch import Tensor

from cudadent42.operations.interface import Exact, Numerics, OnChunk
from cudadent42.operations.moe_backward.case import MoeBackwardCase
from cudadent42.operations.moe_backward.inputs import (
    MoeGradientInputs,
    hard_cases,
    hard_inputs,
    input_sets,
    packed,
    refresh,
)
from cudadent42.operations.moe_backward.reference import gradients_float64, yardstick


def _float64(case: MoeBackwardCase, inputs: MoeGradientInputs, on_chunk: OnChunk) -> Exact:
    return gradients_float64(inputs, case.activation, on_chunk)


def _pytorch(case: MoeBackwardCase, inputs: MoeGradientInputs) -> Tensor:
    return yardstick(inputs, case.activation)


NUMERICS = Numerics(
    input_sets=input_sets,
    hard_inputs=hard_inputs,
    hard_cases=hard_cases,
    float64=_float64,
    pytorch=_pytorch,
    pytorch_plain=_pytorch,
    refresh=refresh,
    gathered=packed,
)
