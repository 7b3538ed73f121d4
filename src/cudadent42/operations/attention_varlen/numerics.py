"""The inputs of attention over a batch of sequences, and what is right for them."""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cudadent42.operations.attention_varlen.case import VarlenCase
from cudadent42.operations.attention_varlen.implementations import prepare_sdpa
from cudadent42.operations.attention_varlen.inputs import (
    VarlenInputs,
    hard_cases,
    hard_inputs,
    input_sets,
    refresh,
)
from cudadent42.operations.attention_varlen.reference import varlen_float64
from cudadent42.operations.interface import Numerics


def _pytorch(case: VarlenCase, inputs: VarlenInputs) -> Tensor:
    result: Tensor = prepare_sdpa(case, inputs)()
    return result


def _pytorch_plain(case: VarlenCase, inputs: VarlenInputs) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return _pytorch(case, inputs)


NUMERICS = Numerics(
    input_sets=input_sets,
    hard_inputs=hard_inputs,
    hard_cases=hard_cases,
    float64=varlen_float64,
    pytorch=_pytorch,
    pytorch_plain=_pytorch_plain,
    refresh=refresh,
    large_rows=64.0,  # scores of hundreds: exp overflows unless the maximum is taken off first
)
