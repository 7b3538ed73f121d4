"""Experts with weights of 8 or 4 bits, and whether a result is right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from moe_reference import Moe, assert_as_exact_as_torch, exact_moe, make_moe

from flashmoe_science.moe_arguments import Activation
from flashmoe_science.quantized import dequantized, quantized


@dataclass(frozen=True)
class Quantized:
    """One call."""

    tensors: tuple[torch.Tensor, ...]
    scales: dict[str, torch.Tensor]
    plain: Moe
    """The same with weights that are dequantised in float64."""


def make(
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    *,
    bits: int,
    groups: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    activation: Activation = Activation.SILU,
) -> Quantized:
    moe = make_moe(tokens, hidden, intermediate, experts, top_k, dtype=dtype, activation=activation)
    w13, w13_scales = quantized(moe.w13, bits=bits, group=groups[0])
    w2, w2_scales = quantized(moe.w2, bits=bits, group=groups[1])
    exact = [dequantized(*pair, torch.float64) for pair in ((w13, w13_scales), (w2, w2_scales))]
    return Quantized(
        (moe.hidden_states, w13, w2, moe.topk_weights, moe.topk_ids),
        {"w13_scales": w13_scales, "w2_scales": w2_scales},
        Moe(moe.hidden_states, *exact, moe.topk_weights, moe.topk_ids),
    )


def assert_right(out: torch.Tensor, made: Quantized, activation: Activation = Activation.SILU) -> None:
    """As exact as PyTorch is with the dequantised weights in the tokens' dtype."""
    exact = exact_moe(made.plain, activation)
    dtype = made.plain.hidden_states.dtype
    rounded = Moe(
        made.plain.hidden_states,
        made.plain.w13.to(dtype),
        made.plain.w2.to(dtype),
        made.plain.topk_weights,
        made.plain.topk_ids,
    )
    assert_as_exact_as_torch(out, rounded, activation, exact)
