"""The gradients of a mixture of experts in float64, how far a rounded computation may lie from each entry of them, and
PyTorch's float32 with the roundings that a dtype implies.

For a slot with weight s, its token's x and incoming gradient g: z = w13 x + b13, y = act(z), d = w2^T g, dz = act'(z)
(s d). Sums over slots: x takes w13^T dz, w13 takes dz x^T, w2 takes g (s y)^T, b13 takes dz, b2 takes s g; s takes
<d, y> + <g, b2>.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from cudadent42.operations.interface import Exact, OnChunk, nothing
from cudadent42.operations.moe_backward.deviations import (
    DEVIATION,
    Rounding,
    Values,
    add_own,
    add_slots,
    blocks,
    zero_squares,
)
from cudadent42.operations.moe_backward.inputs import MoeGradientInputs, differentiated, packed
from cudadent42.operations.moe_backward.slots import by_expert, shifts, through

FACTOR = 1.5
"""On top of the error's bound to first order, for what it leaves out."""

_ACCUMULATED = 2.0**-23
"""Unit of float32 sums."""

_STEPS = 3
"""Roundings in a row of a composition: of the activation, its derivative and their products; of sums over choices."""

_DEVIATIONS = 4
"""Of a sum of roundings that know nothing of each other: one in 16,000 is further off, and FACTOR comes on top."""

_EXPONENTIAL = 2e-6
"""Relative error of an activation by polynomial or by the special function unit."""


def gradients_float64(inputs: MoeGradientInputs, activation: str, on_chunk: OnChunk = nothing) -> Exact:
    """The gradients and their bounds; ``on_chunk`` is called after each part of an expert.

    Bounds are for who rounds every step to the tensors' dtype, as PyTorch's operations do one by one: z, the activation
    and its product with up, d, s, s g, dz, each slot's result and its gradient of its token, and sums over choices;
    with biases both products before them, too.
    """
    layout = inputs.forward.w13_layout
    of_activation = partial(through, activation=activation, layout=layout)
    hidden_states, w13 = inputs.forward.tensors[:2]
    dtype = hidden_states.dtype
    unit = torch.finfo(dtype).eps / 2
    smallest = torch.finfo(dtype).smallest_normal * unit * 2
    summed = _ACCUMULATED * 4 * max(*hidden_states.shape, w13.shape[1]) ** 0.5
    rounding = Rounding.of(dtype, max(*hidden_states.shape, w13.shape[1]))
    exact, spread, squares = _zeros(inputs), _zeros(inputs), zero_squares(inputs)
    for part in by_expert(inputs, torch.float64):
        x, g, up, down, score = part.x.abs(), part.incoming.abs(), part.w13.abs(), part.w2.abs(), part.score
        projected = part.x @ part.w13.T
        z = projected if part.w13_bias is None else projected + part.w13_bias
        unweighted = part.incoming @ part.w2
        off_z = unit * z.abs() + summed * (x @ up.T) + smallest
        if part.w13_bias is not None:
            off_z = off_z + unit * projected.abs() + summed * part.w13_bias.abs()
        off_d = summed * (g @ down) + unit * unweighted.abs()
        between, of_z = of_activation(z, score * unweighted)
        off_between = (_EXPONENTIAL + _STEPS * unit) * between.abs()
        off_of_z = (2 * _EXPONENTIAL + _STEPS * unit) * of_activation(z, (score * unweighted).abs())[1].abs()
        for shift in shifts(off_z, activation, layout):
            other_between, other_of_z = of_activation(z + shift, score * unweighted)
            off_between = off_between + (other_between - between).abs()
            off_of_z = off_of_z + (other_of_z - of_z).abs()
        off_weighted_d = off_d + _weighted_before(g, down, unit)
        off_of_z = off_of_z + of_activation(z, score.abs() * off_weighted_d)[1].abs() + smallest
        of_slots = of_z @ part.w13
        part.add(
            exact,
            of_slots,
            of_z.T @ part.x,
            part.incoming.T @ (score * between),
            (unweighted * between).sum(dim=1) + part.of_score_by_bias,
            of_z.sum(dim=0),
            (score * part.incoming).sum(dim=0),
        )
        off_weighted = score.abs() * off_between + 2 * unit * (score * between).abs() + smallest
        result = between @ part.w2.T
        off_result = unit * result.abs()
        if part.w2_bias is not None:
            off_result = off_result + unit * (result + part.w2_bias).abs() + summed * part.w2_bias.abs()
        part.add(
            spread,
            off_of_z @ up + _STEPS * unit * of_slots.abs() + summed * (of_z.abs() @ up) + smallest,
            (off_of_z + summed * of_z.abs()).T @ x,
            g.T @ (off_weighted + summed * (score * between).abs()),
            (unweighted.abs() * (off_between + summed * between.abs()) + off_d * between.abs()).sum(dim=1)
            + (off_result * g).sum(dim=1),
            (off_of_z + summed * of_z.abs()).sum(dim=0),
            ((2 * unit + summed) * score.abs() * g + smallest).sum(dim=0),
        )
        values = Values(projected, z, unweighted, between, of_z, of_slots, result)
        add_slots(squares, part, values, rounding, activation, layout)
        on_chunk()
    limits = [
        FACTOR * (wide + unit * value.abs()) + smallest for wide, value in zip(spread, exact, strict=True)
    ]
    add_own(squares, exact, rounding)
    return Exact(packed(exact), packed(limits), blocks(inputs, squares))


def yardstick(inputs: MoeGradientInputs, activation: str) -> Tensor:
    """What can be asked of a kernel, packed: sums in float32, and what passes through memory rounded to the dtype."""
    dtype = inputs.output_gradient.dtype
    result = [each.float() for each in _zeros(inputs)]
    for part in by_expert(inputs, torch.float32):
        projected = part.x @ part.w13.T
        z = (projected if part.w13_bias is None else projected + part.w13_bias).to(dtype).float()
        unweighted = part.incoming @ part.w2
        between, of_z = through(z, unweighted * part.score, activation, inputs.forward.w13_layout)
        of_z = of_z.to(dtype).float()
        part.add(
            result,
            (of_z @ part.w13).to(dtype).float(),
            of_z.T @ part.x,
            part.incoming.T @ (part.score * between).to(dtype).float(),
            (unweighted * between).sum(dim=1) + part.of_score_by_bias,
            of_z.sum(dim=0),
            (part.score * part.incoming).sum(dim=0),
        )
    return packed([each.to(dtype) for each in result])


def _weighted_before(g: Tensor, down: Tensor, unit: float) -> Tensor:
    """How far s d is off, but for s, where a composition rounds each entry of s g before the product with w2: as
    autograd does of a result that was weighted after it. The gradient of s has no such rounding: no s is in its d.
    """
    return _DEVIATIONS * DEVIATION * unit * (g.square() @ down.square()).sqrt()


def _zeros(inputs: MoeGradientInputs) -> list[Tensor]:
    return [
        torch.zeros(tensor.shape, dtype=torch.float64, device=tensor.device)
        for tensor in differentiated(inputs.forward)
    ]
