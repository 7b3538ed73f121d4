"""Attention's inputs, and what is right for them."""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention.implementations import prepare_sdpa
from cudadent42.operations.attention.inputs import (
    AttentionInputs,
    hard_cases,
    hard_inputs,
    input_sets,
    refresh,
)
from cudadent42.operations.attention.reference import attention_float64
from cudadent42.operations.interface import Numerics, OnChunk


def _float64(case: AttentionCase, inputs: AttentionInputs, on_chunk: OnChunk) -> Tensor:
    return attention_float64(inputs, case.causal, on_chunk)


def _pytorch(case: AttentionCase, inputs: AttentionInputs) -> Tensor:
    return prepare_sdpa(case, inputs)()


def _pytorch_plain(case: AttentionCase, inputs: AttentionInputs) -> Tensor:
    """PyTorch's fused kernels return NaN for some inputs (a negative scale on CUDA); this composition does not."""
    with sdpa_kernel(SDPBackend.MATH):
        return prepare_sdpa(case, inputs)()


NUMERICS = Numerics(
    input_sets=input_sets,
    hard_inputs=hard_inputs,
    hard_cases=hard_cases,
    float64=_float64,
    pytorch=_pytorch,
    pytorch_plain=_pytorch_plain,
    refresh=refresh,
    large_rows=64.0,  # scores of hundreds: exp overflows unless the maximum is taken off first
)
