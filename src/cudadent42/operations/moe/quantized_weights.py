"""Experts' weights that numbers of 8 or 4 bits stand for, in that form and in the case's dtype: the same values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cudadent42.model.dtypes import DTYPES
from cudadent42.operations.moe.case import MoeCase

_SPREAD = 2.5
"""Numbers of 4 bits are normal with this standard deviation, those of 8 bits with 16 times it: few meet the limits."""


class QuantizedWeights(NamedTuple):
    """As `flashmoe_science.fused_moe` takes them."""

    numbers: Tensor
    """(experts, rows, depth) int8, or (experts, rows, depth / 2) uint8."""
    scales: Tensor
    """(experts, rows, groups), of the case's dtype."""
    wide: Tensor
    """(experts, rows, depth), of the case's dtype: number times scale, exactly."""


def quantized_weights(
    case: MoeCase, rows: int, columns: int, generator: torch.Generator, device: str
) -> QuantizedWeights:
    """Of a matrix of every expert. Scales are powers of two, so that a number times its scale is exact in any dtype."""
    dtype, limit = DTYPES[case.dtype], 2 ** (case.weight_bits - 1) - 1
    spread = _SPREAD * 2.0 ** (case.weight_bits - 4)
    shape = (case.experts, rows, columns)
    groups = columns // case.group
    exponent = round(math.log2(columns**-0.5 / spread))
    lower = torch.randint(
        2, (case.experts, rows, groups), generator=generator, dtype=torch.int32, device=device
    )
    scales = torch.ldexp(torch.ones_like(lower, dtype=torch.float32), exponent - lower).to(dtype)
    numbers = torch.empty(shape, dtype=torch.int8, device=device)
    wide = torch.empty(shape, dtype=dtype, device=device)
    for expert in range(case.experts):  # of all at once, the float32 numbers would be the largest tensor
        drawn = torch.empty(shape[1:], dtype=torch.float32, device=device)
        drawn.normal_(0.0, spread, generator=generator).round_().clamp_(-limit - 1, limit)
        numbers[expert] = drawn.to(torch.int8)
        scaled = drawn.view(rows, groups, case.group) * scales[expert].float().unsqueeze(-1)
        wide[expert] = scaled.flatten(-2).to(dtype)
    if case.weight_bits == 4:
        numbers = ((numbers[..., ::2] + 8) | (numbers[..., 1::2] + 8) << 4).to(torch.uint8)
    return QuantizedWeights(numbers, scales, wide)
