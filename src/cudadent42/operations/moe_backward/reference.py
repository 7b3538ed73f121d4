"""The gradients of a mixture of experts in float64, how far a rounded computation may lie from each entry of them, and
PyTorch's float32 with the roundings that a dtype implies.

For a slot with weight s, its token's x and incoming gradient g: z = w13 x, y = act(z), d = w2^T g, dz = act'(z) (s d).
Sums over slots: x takes w13^T dz, w13 takes dz x^T, w2 takes g (s y)^T; s takes <d, y>.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cudadent42.operations.interface import Exact, OnChunk, nothing
from cudadent42.operations.moe.reference import activate
from cudadent42.operations.moe_backward.inputs import MoeGradientInputs, packed

_CHUNK_ENTRIES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Entries of an expert's projections held at a time, some twenty such in float64."""

FACTOR = 1.5
"""On top of the error's bound to first order, for what it leaves out."""

_ACCUMULATED = 2.0**-23
"""Unit of float32 sums."""

_STEPS = 3
"""Roundings in a row of a composition: of the activation, its derivative and their products; of sums over choices."""

_DEVIATIONS = 4
"""Of a sum of roundings that know nothing of each other: one in 16,000 is further off, and FACTOR comes on top."""

_DEVIATION = 3**-0.5
"""Of one rounding, in units: errors spread evenly over half a step either way. Of most numbers it is less."""

_EXPONENTIAL = 2e-6
"""Relative error of an activation by polynomial or by the special function unit."""


def gradients_float64(inputs: MoeGradientInputs, activation: str, on_chunk: OnChunk = nothing) -> Exact:
    """The gradients and their bounds; ``on_chunk`` is called after each part of an expert.

    Bounds are for who rounds every step to the tensors' dtype, as PyTorch's operations do one by one: z, the activation
    and its product with up, d, s, s g, dz, each slot's result and its gradient of its token, and sums over choices.
    """
    hidden_states, w13 = inputs.forward.tensors[:2]
    dtype = hidden_states.dtype
    unit = torch.finfo(dtype).eps / 2
    smallest = torch.finfo(dtype).smallest_normal * unit * 2
    summed = _ACCUMULATED * 4 * max(*hidden_states.shape, w13.shape[1]) ** 0.5
    exact, spread = _zeros(inputs), _zeros(inputs)
    for part in _parts(inputs, torch.float64):
        x, g, up, down, score = part.x.abs(), part.incoming.abs(), part.w13.abs(), part.w2.abs(), part.score
        z = part.x @ part.w13.T
        unweighted = part.incoming @ part.w2
        off_z = unit * z.abs() + summed * (x @ up.T) + smallest
        off_d = summed * (g @ down) + unit * unweighted.abs()
        between, of_z = _through(z, score * unweighted, activation)
        off_between = (_EXPONENTIAL + _STEPS * unit) * between.abs()
        off_of_z = (2 * _EXPONENTIAL + _STEPS * unit) * _through(z, (score * unweighted).abs(), activation)[
            1
        ].abs()
        for shift in _shifts(z, off_z, activation):
            other_between, other_of_z = _through(z + shift, score * unweighted, activation)
            off_between = off_between + (other_between - between).abs()
            off_of_z = off_of_z + (other_of_z - of_z).abs()
        off_weighted_d = off_d + _weighted_before(g, down, unit)
        off_of_z = off_of_z + _through(z, score.abs() * off_weighted_d, activation)[1].abs() + smallest
        of_slots = of_z @ part.w13
        part.add(
            exact,
            of_slots,
            of_z.T @ part.x,
            part.incoming.T @ (score * between),
            (unweighted * between).sum(dim=1),
        )
        off_weighted = score.abs() * off_between + 2 * unit * (score * between).abs() + smallest
        result = (between @ part.w2.T).abs()
        part.add(
            spread,
            off_of_z @ up + _STEPS * unit * of_slots.abs() + summed * (of_z.abs() @ up) + smallest,
            (off_of_z + summed * of_z.abs()).T @ x,
            g.T @ (off_weighted + summed * (score * between).abs()),
            (unweighted.abs() * (off_between + summed * between.abs()) + off_d * between.abs()).sum(dim=1)
            + unit * (result * g).sum(dim=1),
        )
        on_chunk()
    limits = [
        FACTOR * (wide + unit * value.abs()) + smallest for wide, value in zip(spread, exact, strict=True)
    ]
    return Exact(packed(exact), packed(limits))


def yardstick(inputs: MoeGradientInputs, activation: str) -> Tensor:
    """What can be asked of a kernel, packed: sums in float32, and what passes through memory rounded to the dtype."""
    dtype = inputs.output_gradient.dtype
    result = [each.float() for each in _zeros(inputs)]
    for part in _parts(inputs, torch.float32):
        z = (part.x @ part.w13.T).to(dtype).float()
        unweighted = part.incoming @ part.w2
        between, of_z = _through(z, unweighted * part.score, activation)
        of_z = of_z.to(dtype).float()
        part.add(
            result,
            (of_z @ part.w13).to(dtype).float(),
            of_z.T @ part.x,
            part.incoming.T @ (part.score * between).to(dtype).float(),
            (unweighted * between).sum(dim=1),
        )
    return packed([each.to(dtype) for each in result])


@dataclass(frozen=True)
class _Part:
    """Some slots of an expert, as numbers of one floating type."""

    expert: int
    token: Tensor
    choice: Tensor
    x: Tensor
    incoming: Tensor
    score: Tensor
    """(slots, 1)."""
    w13: Tensor
    w2: Tensor

    def add(self, to: list[Tensor], of_x: Tensor, of_w13: Tensor, of_w2: Tensor, of_score: Tensor) -> None:
        """To the four gradients."""
        to[0].index_add_(0, self.token, of_x)
        to[1][self.expert] += of_w13
        to[2][self.expert] += of_w2
        to[3][self.token, self.choice] = of_score


def _weighted_before(g: Tensor, down: Tensor, unit: float) -> Tensor:
    """How far s d is off, but for s, where a composition rounds each entry of s g before the product with w2: as
    autograd does of a result that was weighted behind it. The gradient of s has no such rounding: no s is in its d.
    """
    return _DEVIATIONS * _DEVIATION * unit * (g.square() @ down.square()).sqrt()


def _parts(inputs: MoeGradientInputs, exact: torch.dtype) -> Iterator[_Part]:
    hidden_states, w13, w2, weights, ids = inputs.forward.tensors
    rows = max(1, _CHUNK_ENTRIES[hidden_states.device.type] // w13.shape[1])
    chosen: list[int] = torch.unique(ids).tolist()
    blocks = []
    for expert in (each for each in chosen if 0 <= each < len(w13)):
        token, choice = torch.nonzero(ids == expert, as_tuple=True)
        blocks += [
            (expert, token[begin : begin + rows], choice[begin : begin + rows])
            for begin in range(0, len(token), rows)
        ]

    def part(slots: tuple[int, Tensor, Tensor]) -> _Part:
        expert, token, choice = slots
        return _Part(
            expert,
            token,
            choice,
            hidden_states[token].to(exact),
            inputs.output_gradient[token].to(exact),
            weights[token, choice, None].to(exact),
            w13[expert].to(exact),
            w2[expert].to(exact),
        )

    return map(part, blocks)


def _through(z: Tensor, grad: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activated values, and the gradient of z from theirs."""
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        between = activate(leaf, activation)
        (of_z,) = torch.autograd.grad(between, leaf, grad)
    return between.detach(), of_z


def _shifts(z: Tensor, off: Tensor, activation: str) -> list[Tensor]:
    """z moved by as much as it may be off: gate and up one at a time."""
    if activation.endswith("_no_mul"):
        return [off]
    gate, up = off.chunk(2, dim=1)
    return [torch.cat((gate, torch.zeros_like(up)), dim=1), torch.cat((torch.zeros_like(gate), up), dim=1)]


def _zeros(inputs: MoeGradientInputs) -> list[Tensor]:
    return [
        torch.zeros(tensor.shape, dtype=torch.float64, device=tensor.device)
        for tensor in inputs.forward.tensors[:4]
    ]
