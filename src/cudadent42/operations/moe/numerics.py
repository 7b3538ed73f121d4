"""The mixture of experts' inputs, and what is right for them."""

from __future__ import annotations

from torch import Tensor

from cudadent42.operations.interface import Numerics, OnChunk
from cudadent42.operations.moe.case import MoeCase
from cudadent42.operations.moe.hard_inputs import hard_cases, hard_inputs
from cudadent42.operations.moe.inputs import MoeInputs, input_sets, refresh
from cudadent42.operations.moe.reference import moe_float64, yardstick


def _float64(case: MoeCase, inputs: MoeInputs, on_chunk: OnChunk) -> Tensor:
    return moe_float64(inputs, case.activation, on_chunk)


def _pytorch(case: MoeCase, inputs: MoeInputs) -> Tensor:
    return yardstick(inputs, case.activation)


NUMERICS = Numerics(
    input_sets=input_sets,
    hard_inputs=hard_inputs,
    hard_cases=hard_cases,
    float64=_float64,
    pytorch=_pytorch,
    pytorch_plain=_pytorch,
    refresh=refresh,
)
