"""Gradients of a mixture of experts: float64 through PyTorch's autograd, bounds, and a backend for differences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from moe_reference import Moe, composed_moe, make_moe
from torch.nn import functional

from computed_once import computed_once
from flashmoe_science import moe_composition
from flashmoe_science.moe_arguments import SWIGLU_OAI_LIMIT, Activation, W13Layout
from flashmoe_science.moe_gradients import (
    NO_MAIN_GRADIENTS,
    MainGradients,
    MoeGradients,
    MoeNeeds,
    MoeTensors,
)

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

    PyTorch's are the largest of some orders of tokens and of hidden dimensions: where terms cancel, as in an
    activation's derivative near its zero, one order may come out exact by luck.

    For each gradient the worst element and the RMS, for each row (a token, or an expert's row of weights) the RMS, and
    exact zeros for tokens, weights and experts of no slot.
    """
    exact, theirs = _exact_and_in_several_orders(moe, grad_output, activation, layout)
    _assert_as_exact(ours, moe, exact, theirs)


def assert_gradients_as_exact_as_composed(
    ours: tuple[torch.Tensor | None, ...],
    moe: Moe,
    grad_output: torch.Tensor,
    activation: Activation = Activation.SILU,
    layout: W13Layout = W13Layout.CONCAT,
    *,
    device: str = "cuda",
) -> None:
    """The same for many slots, where autograd takes minutes: ours and theirs against the composition of products of
    experts, which is computed on a device.
    """
    there = Moe(*(tensor.to(device) for tensor in moe.tensors))
    options = there, grad_output.to(device), activation, layout
    exact = gradients_by_composition(*options[:2], torch.float64, *options[2:])
    orders = _in_several_orders(*options, by=gradients_by_composition)
    theirs = [tuple(each.cpu() for each in of_one) for of_one in zip(*orders, strict=True)]
    _assert_as_exact(ours, moe, tuple(each.cpu() for each in exact), theirs)


def gradients_by_composition(
    moe: Moe,
    grad_output: torch.Tensor,
    dtype: torch.dtype,
    activation: Activation,
    layout: W13Layout,
) -> tuple[torch.Tensor, ...]:
    *floats, weights, ids = moe.tensors
    combined = torch.float64 if dtype is torch.float64 else torch.float32
    gradients = moe_composition.backward(
        grad_output.to(dtype),
        MoeTensors(*(tensor.to(dtype) for tensor in floats), weights.to(combined), ids),
        None,
        activation=activation,
        w13_layout=layout,
        needs=MoeNeeds(True, True, True, True),
    )
    return tuple(gradient for gradient in gradients if gradient is not None)


def _assert_as_exact(
    ours: tuple[torch.Tensor | None, ...],
    moe: Moe,
    exact: tuple[torch.Tensor, ...],
    theirs: list[tuple[torch.Tensor, ...]],
) -> None:
    valid = (moe.topk_ids >= 0) & (moe.topk_ids < len(moe.w13))
    idle = torch.ones(len(moe.w13), dtype=torch.bool)
    idle[moe.topk_ids[valid].long()] = False
    for name, our, without in zip(NAMES, ours, (~valid.any(dim=1), idle, idle, ~valid), strict=True):
        assert our is None or not our[without].any(), name
    for name, our, true, orders in zip(NAMES, ours, exact, theirs, strict=True):
        if our is None or true.numel() == 0:
            continue
        assert our.shape == true.shape, name
        assert our.is_contiguous(), name
        assert our.dtype == getattr(moe, name).dtype, name
        eps = torch.finfo(moe.hidden_states.dtype).eps
        size = true.square().mean().sqrt()
        error, bounds = our.double() - true, torch.stack([their.double() - true for their in orders])
        worst, rms = bounds.abs().max(), bounds.flatten(1).square().mean(1).sqrt().max()
        assert error.abs().max() <= 2 * worst + 2 * eps * true.abs().max(), name
        assert error.square().mean().sqrt() <= 2 * rms + eps * size, name
        if name == "topk_weights":  # a slot has one number, which may come out exact by luck too
            error, true, bounds = (
                error.reshape(1, -1),
                true.reshape(1, -1),
                bounds.reshape(len(bounds), 1, -1),
            )
        rows, of_rows = error.flatten(0, -2), true.flatten(0, -2)
        row_size = of_rows.square().mean(-1).sqrt()
        of_bound = bounds.flatten(1, -2).square().mean(-1).sqrt().amax(0)
        allowed = 4 * of_bound + 4 * eps * (row_size + size)
        assert (rows.square().mean(-1).sqrt() <= allowed).all(), name


_ORDERS = 4


@computed_once
def _exact_and_in_several_orders(
    moe: Moe, grad_output: torch.Tensor, activation: Activation, layout: W13Layout
) -> tuple[tuple[torch.Tensor, ...], list[tuple[torch.Tensor, ...]]]:
    """In float64, and for each gradient PyTorch's in the tensors' dtype."""
    exact = gradients_by_autograd(moe, grad_output, torch.float64, activation, layout)
    theirs = list(zip(*_in_several_orders(moe, grad_output, activation, layout), strict=True))
    return exact, theirs


def _in_several_orders(
    moe: Moe,
    grad_output: torch.Tensor,
    activation: Activation,
    layout: W13Layout,
    by: Callable[..., tuple[torch.Tensor, ...]] = gradients_by_autograd,
) -> Iterator[tuple[torch.Tensor, ...]]:
    """In the tensors' dtype, with tokens and hidden dimensions in different orders."""
    generator = torch.Generator().manual_seed(0)

    def order_of(count: int, number: int) -> torch.Tensor:
        order = torch.arange(count) if number == 0 else torch.randperm(count, generator=generator)
        return order.to(moe.hidden_states.device)

    for number in range(_ORDERS):
        rows, columns = (order_of(count, number) for count in moe.hidden_states.shape)
        shuffled = Moe(
            moe.hidden_states[rows][:, columns],
            moe.w13[..., columns],
            moe.w2[:, columns],
            moe.topk_weights[rows],
            moe.topk_ids[rows],
        )
        hidden, w13, w2, weights = by(
            shuffled, grad_output[rows][:, columns], moe.hidden_states.dtype, activation, layout
        )
        rows_back, columns_back = rows.argsort(), columns.argsort()
        yield (
            hidden[rows_back][:, columns_back],
            w13[..., columns_back],
            w2[:, columns_back],
            weights[rows_back],
        )


def around_the_limits(moe: Moe, layout: W13Layout) -> Moe:
    """With biases that bring a part of the gates and ups to each limit of the clamped activation. Half of these go
    beyond it, and a few are at it.
    """
    assert moe.w13_bias is not None
    gates, ups = torch.zeros(moe.w13_bias.shape).chunk(2, dim=1)
    gates[:, ::3] = SWIGLU_OAI_LIMIT
    ups[:, 1::4], ups[:, 2::4] = SWIGLU_OAI_LIMIT, -SWIGLU_OAI_LIMIT
    moved = moe.w13_bias + moe_composition.join_projections(gates, ups, layout)
    return replace(moe, w13_bias=moved.to(moe.w13.dtype))


def projected(moe: Moe, layout: W13Layout) -> torch.Tensor:
    """z with the columns of w13's rows, from float64, rounded once."""
    order, counts = moe_composition.slots_by_expert(moe.topk_ids, len(moe.w13))
    rows = moe.hidden_states.double()[order // moe.topk_ids.shape[1]].split(counts)
    biases = [None] * len(counts) if moe.w13_bias is None else moe.w13_bias.double().unbind()
    parts = map(functional.linear, rows, moe.w13.double().unbind(), biases)
    return torch.cat(list(parts)).to(moe.w13.dtype)


def assert_clamped_gradients(
    ours: tuple[torch.Tensor | None, ...],
    moe: Moe,
    grad_output: torch.Tensor,
    z: torch.Tensor,
    layout: W13Layout,
) -> None:
    """All six against the composition in float64 from the kernel's own z, so that rounding crosses no limit.

    Their errors are a third of a rounding to the tensors' dtype, in the RMS.
    """
    slots = int(((moe.topk_ids >= 0) & (moe.topk_ids < len(moe.w13))).sum())
    gate, up = moe_composition.split_projections(z[:slots].double(), layout)
    for toward_a_limit in (gate, up, -up):
        assert 0.08 < (toward_a_limit > SWIGLU_OAI_LIMIT).double().mean() < 0.25
        assert (toward_a_limit == SWIGLU_OAI_LIMIT).any()
    *floats, w13_bias, w2_bias = (tensor.double() for tensor in (*moe.tensors[:4], *moe.biases.values()))
    right = moe_composition.backward(
        grad_output.double(),
        MoeTensors(*floats, moe.topk_ids, w13_bias, w2_bias),
        z.double(),
        activation=Activation.SWIGLU_OAI,
        w13_layout=layout,
        needs=MoeNeeds(*[True] * 6),
    )
    for name, our, true in zip(MoeNeeds._fields, ours, right, strict=True):
        assert our is not None
        assert true is not None
        error = (our.double() - true).square().mean().sqrt() / true.square().mean().sqrt()
        assert error < torch.finfo(grad_output.dtype).eps / 2, name


def whole_numbers(*sizes: int, dtype: torch.dtype) -> tuple[Moe, torch.Tensor]:
    """A layer of squared ReLUs, and a gradient of its output, of small whole numbers.

    What a kernel rounds on the way to the weights' gradients fits in 8 bits. Their sums are of routing weights of 1 and
    2 ** -9, and float32 holds them.
    """
    made = make_moe(*sizes, dtype=dtype, activation=Activation.RELU2_NO_MUL)
    incoming = torch.randn(made.hidden_states.shape, generator=torch.Generator().manual_seed(1))

    def signs(values: torch.Tensor, least: float) -> torch.Tensor:
        return (values.sign() * (values.abs() > least * values.float().std())).to(dtype)

    moe = Moe(
        *(signs(made.hidden_states, 0.7), signs(made.w13, 1.3), signs(made.w2, 1.3)),
        torch.where(made.topk_weights > 0.5, 1.0, 2.0**-9),
        made.topk_ids,
    )
    return moe, signs(incoming, 0.7)


def assert_added_in_float32(
    buffers: Iterable[torch.Tensor], starts: Iterable[torch.Tensor], moe: Moe, grad_output: torch.Tensor
) -> None:
    """The exact sums of `whole_numbers` were added, which 16 bits do not hold."""
    exact = gradients_by_autograd(moe, grad_output, activation=Activation.RELU2_NO_MUL)[1:3]
    for buffer, start, sums in zip(buffers, starts, exact, strict=True):
        assert (sums != sums.to(moe.w13.dtype)).double().mean() > 0.5
        assert torch.equal(buffer.cpu().double(), start.cpu().double() + sums)


def assert_rounded_last(
    sums: Iterable[torch.Tensor | None], gradients: Iterable[torch.Tensor | None]
) -> None:
    """What was added to zeros is not rounded, and rounded it has the bits of the gradients without buffers."""
    for added, gradient in zip(sums, gradients, strict=True):
        assert added is not None
        assert gradient is not None
        assert added.dtype is torch.float32
        assert torch.equal(added.to(gradient.dtype), gradient)
        of_some_slot = gradient != 0
        assert (added != gradient.float())[of_some_slot].float().mean() > 0.9


@dataclass(frozen=True)
class ReferenceBackend:
    """A `flashmoe_science.moe_gradients.MoeBackend` for any floating dtype, biases included."""

    @staticmethod
    def keeps_z(*tensors: torch.Tensor, **options: object) -> bool:
        return True

    @staticmethod
    def forward(
        tensors: MoeTensors, *, activation: Activation, w13_layout: W13Layout, keep_z: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden_states, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias = tensors
        k = topk_ids.shape[1]
        order, counts = moe_composition.slots_by_expert(topk_ids, len(w13))
        rows = order // k
        x = hidden_states[rows]
        z = hidden_states.new_full((topk_ids.numel(), w13.shape[1]), torch.nan)
        down = hidden_states.new_empty(len(order), w2.shape[1])
        slots = [
            slice(end - count, end) for end, count in zip(itertools.accumulate(counts), counts, strict=True)
        ]
        for expert, own in enumerate(slots):
            bias = None if w13_bias is None else w13_bias[expert]
            z[own] = functional.linear(x[own], w13[expert], bias)
        # For all experts at once: differences ask for thousands of forward passes of a few numbers each.
        between = moe_composition.activate(z[: len(order)], activation, w13_layout)
        for expert, own in enumerate(slots):
            bias = None if w2_bias is None else w2_bias[expert]
            down[own] = functional.linear(between[own], w2[expert], bias)
        scores = topk_weights.flatten()[order, None].to(down.dtype)
        output = torch.zeros_like(hidden_states).index_add_(0, rows, scores * down)
        return output, z if keep_z else None

    @staticmethod
    def backward(
        grad_output: torch.Tensor,
        tensors: MoeTensors,
        z: torch.Tensor | None,
        *,
        main: MainGradients = NO_MAIN_GRADIENTS,
        **options: Any,
    ) -> MoeGradients:
        return main.take(moe_composition.backward(grad_output, tensors, z, **options))
