"""Gradients of a mixture of experts: float64 through PyTorch's autograd, bounds, and a backend for differences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from moe_reference import Moe, composed_moe
from torch.nn import functional

from flashmoe_science import moe_composition
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_gradients import MoeGradients

NAMES = ("hidden_states", "w13", "w2", "topk_weights")


def gradients_by_autograd(
    moe: Moe,
    grad_output: torch.Tensor,
    dtype: torch.dtype = torch.float64,
    activation: Activation = Activation.SILU,
    layout: W13Layout = W13Layout.CONCAT,
) -> tuple[torch.Tensor, ...]:
    """Those of hidden_states, w13, w2 and topk_weights, by autograd through the formula, slot by slot."""
    *floats, weights, ids = moe.tensors
    combined = torch.float64 if dtype is torch.float64 else torch.float32
    leaves = [
        *(tensor.detach().to(dtype).requires_grad_() for tensor in floats),
        weights.detach().to(combined).requires_grad_(),
    ]
    output = composed_moe(Moe(*leaves, ids), activation, layout, dtype)
    if not output.requires_grad:  # no slot is of an expert
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    gradients = torch.autograd.grad(output, leaves, grad_output.to(dtype), allow_unused=True)
    return tuple(
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
    )


def assert_gradients_as_exact_as_torch(
    ours: tuple[torch.Tensor | None, ...],
    moe: Moe,
    grad_output: torch.Tensor,
    activation: Activation = Activation.SILU,
    layout: W13Layout = W13Layout.CONCAT,
) -> None:
    """Errors against float64 at most twice those of PyTorch's operations in the same dtype, and a rounding more.

    For each gradient the worst element and the RMS, for each row (a token, or an expert's row of weights) the RMS, and
    exact zeros for tokens, weights and experts of no slot.
    """
    valid = (moe.topk_ids >= 0) & (moe.topk_ids < len(moe.w13))
    idle = torch.ones(len(moe.w13), dtype=torch.bool)
    idle[moe.topk_ids[valid].long()] = False
    for name, our, without in zip(NAMES, ours, (~valid.any(dim=1), idle, idle, ~valid), strict=True):
        assert our is None or not our[without].any(), name
    exact = gradients_by_autograd(moe, grad_output, torch.float64, activation, layout)
    theirs = gradients_by_autograd(moe, grad_output, moe.hidden_states.dtype, activation, layout)
    for name, our, true, their in zip(NAMES, ours, exact, theirs, strict=True):
        if our is None or true.numel() == 0:
            continue
        assert our.shape == true.shape, name
        assert our.is_contiguous(), name
        assert our.dtype == getattr(moe, name).dtype, name
        eps = torch.finfo(moe.hidden_states.dtype).eps
        size = true.square().mean().sqrt()
        error, bound = our.double() - true, their.double() - true
        assert error.abs().max() <= 2 * bound.abs().max() + 2 * eps * true.abs().max(), name
        assert error.square().mean().sqrt() <= 2 * bound.square().mean().sqrt() + eps * size, name
        rows, of_rows = error.flatten(0, -2), true.flatten(0, -2)
        row_size = of_rows.square().mean(-1).sqrt()
        allowed = 4 * bound.flatten(0, -2).square().mean(-1).sqrt() + 4 * eps * (row_size + size)
        assert (rows.square().mean(-1).sqrt() <= allowed).all(), name


@dataclass(frozen=True)
class ReferenceBackend:
    """A `flashmoe_science.moe_gradients.MoeBackend` for any floating dtype, biases included."""

    @staticmethod
    def keeps_z(*tensors: torch.Tensor, **options: object) -> bool:
        return True

    @staticmethod
    def forward(
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        w13_bias: torch.Tensor | None,
        w2_bias: torch.Tensor | None,
        *,
        activation: Activation,
        w13_layout: W13Layout,
        keep_z: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        k = topk_ids.shape[1]
        order, counts = moe_composition.slots_by_expert(topk_ids, len(w13))
        z = hidden_states.new_full((topk_ids.numel(), w13.shape[1]), torch.nan)
        output = torch.zeros_like(hidden_states)
        end = 0
        for expert, count in enumerate(counts):
            begin, end = end, end + count
            slots = order[begin:end]
            bias = None if w13_bias is None else w13_bias[expert]
            z[begin:end] = functional.linear(hidden_states[slots // k], w13[expert], bias)
            between = moe_composition.activate(z[begin:end], activation, w13_layout)
            down = functional.linear(between, w2[expert], None if w2_bias is None else w2_bias[expert])
            output.index_add_(0, slots // k, topk_weights.flatten()[slots, None].to(down.dtype) * down)
        return output, z if keep_z else None

    @staticmethod
    def backward(*tensors: torch.Tensor, **options: object) -> MoeGradients:
        return moe_composition.backward(*tensors, **options)  # type: ignore[arg-type]
