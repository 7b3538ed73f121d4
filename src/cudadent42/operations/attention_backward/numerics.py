"""Inputs of attention's backward pass, and what is right for them."""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cudadent42.operations.attention_backward.case import AttentionBackwardCase
from cudadent42.operations.attention_backward.implementations import sdpa_gradients
from cudadent42.operations.attention_backward.inputs import (
    BackwardInputs,
    hard_cases,
    hard_inputs,
    input_sets,
    packed,
    refresh,
)
from cudadent42.operations.attention_backward.reference import gradients_float64
from cudadent42.operations.interface import Exact, Numerics, OnChunk


def _float64(case: AttentionBackwardCase, inputs: BackwardInputs, on_chunk: OnChunk) -> Exact:
    return gradients_float64(inputs, case.causal, on_chunk)


def _pytorch_plain(case: AttentionBackwardCase, inputs: BackwardInputs) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa_gradients(case, inputs)


NUMERICS = Numerics(
    input_sets=input_sets,
    hard_inputs=hard_inputs,
    hard_cases=hard_cases,
    float64=_float64,
    pytorch=sdpa_gradients,
    pytorch_plain=_pytorch_plain,
    refresh=refresh,
    gathered=packed,
)
