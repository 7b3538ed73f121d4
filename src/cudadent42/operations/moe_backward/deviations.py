"""How far rounding is expected to move the gradients of a mixture of experts, by token and by expert.

Roundings that know nothing of each other add as squares. A token's row and an expert's gradient are made of so many
that the root of their squares' sum is hardly ever far from what is expected: a bound for them need not be one for the
worst case, in which all errors have one sign.

It is expected of who rounds every step to the tensors' dtype, as PyTorch's operations do one by one. What rounds less
often is less far off. Squares are summed over a block's entries, so that no gradient's size is held once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cudadent42.operations.interface import Blocks
from cudadent42.operations.moe_backward.inputs import MoeGradientInputs
from cudadent42.operations.moe_backward.slots import Part, shifts, through

FACTOR = 2.0
"""How many times the expected error a block may have. Right results of PyTorch's compositions reach 1.6. Tokens know
nothing of each other, so it is nearer 1 for all blocks together: the excess is divided by the root of their number."""

FACTOR_OF_ONE = 4.0
"""The same of one number. A token's routing weights are few of them, and the excess is divided as above."""

DEVIATION = 3**-0.5
"""Of one rounding, in units: errors spread evenly over half a step either way. Of most numbers it is less."""

_ACCUMULATED = 2.0**-24
"""Unit of float32 sums."""

_EXPONENTIAL = 5e-7
"""Relative, of an activation by polynomial or by the special function unit; at most it is four times as much."""

_ACTIVATED = 2
"""Roundings on the way from z to the activated values: of the activation and its product with up."""

_DERIVED = 3
"""From d to the gradient of z: of the derivative, the activation and their products."""

_WEIGHTED = 2
"""Of a routing weight, and of its product with g or with the activated values. All entries of a slot share the first;
the second, too, where all entries of g are one number."""


@dataclass(frozen=True)
class Values:
    """A part's slots on their way through the layer and back; by the letters of `reference`."""

    projected: Tensor
    """z without its bias."""
    z: Tensor
    unweighted: Tensor
    """d."""
    between: Tensor
    """y."""
    of_z: Tensor
    of_slots: Tensor
    """What each slot gives to its token's gradient."""
    result: Tensor
    """w2 y."""


@dataclass(frozen=True)
class Rounding:
    """Squared deviations that steps are expected to have, relative to the squares of what they round."""

    step: float
    """Of a rounding to the dtype."""
    sums: float
    """Of a sum in float32."""
    smallest: float
    """Of a rounding near zero, and not relative."""

    @classmethod
    def of(cls, dtype: torch.dtype, terms: int) -> Rounding:
        number = torch.finfo(dtype)
        return cls(
            (DEVIATION * number.eps / 2) ** 2,
            (DEVIATION * _ACCUMULATED) ** 2 * terms,
            (number.smallest_normal * number.eps) ** 2,
        )

    def of_sum(self, terms: Tensor, value: Tensor) -> Tensor:
        """Of a sum whose square is ``value``; its terms' squares add to ``terms``. Partial sums grow as either."""
        return self.sums * (terms / 2 + value / 3)


@dataclass(frozen=True)
class _Deviations:
    """Squared, of each entry."""

    unweighted: Tensor
    between: Tensor
    of_z: Tensor
    result: Tensor


def zero_squares(inputs: MoeGradientInputs) -> list[Tensor]:
    """Of each block of each gradient, in the order of `differentiated`; of routing weights, of each entry."""
    experts = (len(inputs.forward.w13),)
    shapes = [inputs.forward.hidden_states.shape[:1], experts, experts, inputs.forward.topk_weights.shape]
    shapes += [] if inputs.forward.biases is None else [experts, experts]
    device = inputs.output_gradient.device
    return [torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes]


def add_slots(
    squares: list[Tensor], part: Part, values: Values, rounding: Rounding, activation: str, layout: str
) -> None:
    """Adds what blocks get of the roundings in a part's slots. A token that has an expert several times is rounded
    alike each time, and such errors add as they are."""
    deviations = _of_entries(part, values, rounding, activation, layout)
    of_slots = _of_slots(part, values, deviations, rounding)
    of_x, of_w13, of_w2, of_score, *of_biases = ((part.times * each).flatten() for each in of_slots)
    part.add(squares, of_x, of_w13.sum(), of_w2.sum(), of_score, *(each.sum() for each in of_biases))


def add_own(squares: list[Tensor], exact: list[Tensor], rounding: Rounding) -> None:
    """Adds that of the gradients themselves: of their own rounding, and as sums over slots."""
    for square, value in zip(squares, exact, strict=True):
        entries = value.unsqueeze(-1).flatten(square.ndim)
        square += (rounding.step + rounding.sums / 3) * _summed(entries.square()).squeeze(-1)
        square += rounding.smallest * entries.shape[-1]


def blocks(inputs: MoeGradientInputs, squares: list[Tensor]) -> tuple[Blocks, ...]:
    """The gradients' blocks, as `packed` has them."""
    w13_rows, width = inputs.forward.w13.shape[1], inputs.result_like.shape[1]
    kinds = (
        ("hidden_states", "token", 1),
        ("w13", "expert", w13_rows),
        ("w2", "expert", inputs.forward.w2.shape[2]),
        ("topk_weights", "token", 1),
        ("w13_bias", "expert", -(-w13_rows // width)),
        ("w2_bias", "expert", 1),
    )
    tokens = _alike(squares[0])
    made, first = [], 0
    for (gradient, owner, rows), square in zip(kinds, squares, strict=False):
        made.append(Blocks(gradient, owner, first, rows, *_limits(square, tokens)))
        first += rows * len(square)
    return tuple(made)


def _limits(squares: Tensor, tokens: Tensor) -> tuple[Tensor, float]:
    """Of each block, and of all. Squares are those of blocks, but of routing weights those of entries."""
    if squares.ndim == 1:
        return FACTOR * squares.sqrt(), float(_factor(FACTOR, tokens) * squares.sum().sqrt())
    of_token, of_all = (_factor(FACTOR_OF_ONE, _alike(each)) for each in (squares, squares.flatten()))
    return of_token * squares.sum(dim=1).sqrt(), float(of_all * squares.sum().sqrt())


def _factor(of_one: float, count: Tensor) -> Tensor:
    """Of so many alike, together, that know nothing of each other."""
    return 1.0 + (of_one - 1.0) / count.sqrt()


def _alike(squares: Tensor) -> Tensor:
    """How many alike vary as the sum over the last dimension does: fewer than there are, if few have most of it."""
    return (squares.sum(dim=-1).square() / squares.square().sum(dim=-1)).nan_to_num(1.0).clamp(min=1.0)


def _of_entries(part: Part, values: Values, rounding: Rounding, activation: str, layout: str) -> _Deviations:
    of_activation = partial(through, activation=activation, layout=layout)
    step, smallest = rounding.step, rounding.smallest
    projected, score = values.projected.square(), part.score.square()
    of_x = part.x.square() @ part.w13.square().T
    of_g = part.incoming.square() @ part.w2.square()

    z = step * values.z.square() + rounding.of_sum(of_x, projected) + smallest
    unweighted = values.unweighted.square()
    unweighted = step * unweighted + rounding.of_sum(of_g, unweighted) + smallest
    result = step * values.result.square()
    if part.w13_bias is not None and part.w2_bias is not None:
        z = z + step * projected
        result = result + step * (values.result + part.w2_bias).square()

    between = (_EXPONENTIAL**2 + _ACTIVATED * step) * values.between.square() + smallest
    of_z = (_EXPONENTIAL**2 + _DERIVED * step) * values.of_z.square() + smallest
    for shift in shifts(z.sqrt(), activation, layout):
        other_between, other_of_z = of_activation(values.z + shift, part.score * values.unweighted)
        between = between + (other_between - values.between).square()
        of_z = of_z + (other_of_z - values.of_z).square()
    weighted = score * (unweighted + step * of_g) + smallest
    of_z = of_z + of_activation(values.z, weighted.sqrt())[1].square()
    return _Deviations(unweighted, between, of_z, result)


def _of_slots(part: Part, values: Values, deviations: _Deviations, rounding: Rounding) -> tuple[Tensor, ...]:
    """(slots, 1) of each gradient: what is expected of a slot's share in its block, squared."""
    step, smallest = rounding.step, rounding.smallest
    weighted, in_sums = _WEIGHTED * step, rounding.sums / 2
    score, g = part.score.square(), part.incoming.square()
    between, of_z, unweighted = values.between.square(), values.of_z.square(), values.unweighted.square()
    of_x, of_g, of_weights = (_summed(each) for each in (part.x.square(), g, part.w13.square()))
    in_tokens = weighted + step * (1 + part.choices / 2) + rounding.sums / 3
    of_z_off = _summed(deviations.of_z + (weighted + in_sums) * of_z)
    of_w2 = score * (deviations.between + (weighted + step + in_sums) * between) + smallest
    of_score = unweighted * (deviations.between + in_sums * between) + deviations.unweighted * between
    return (
        _summed((deviations.of_z + in_sums * of_z) * of_weights.T)
        + in_tokens * _summed(values.of_slots.square())
        + smallest * g.shape[1],
        of_z_off * of_x,
        of_g * _summed(of_w2),
        _summed(of_score) + _summed(2 * g * deviations.result) + smallest,
        of_z_off,
        (weighted + in_sums) * score * of_g + smallest * g.shape[1],
    )


def _summed(squares: Tensor) -> Tensor:
    """Over the last dimension, but for NaN, whose places are compared by themselves."""
    return squares.nansum(dim=-1, keepdim=True)
