"""The gradients of a mixture of experts in float64, how far a rounded computation may lie from each entry of them, and
PyTorch's float32 with the roundings that a dtype implies.

For a slot with weight s, its token's x and incoming gradient g: z = w13 x + b13, y = act(z), d = w2^T g, dz = act'(z)
(s d). Sums over slots: x takes w13^T dz, w13 takes dz x^T, w2 takes g (s y)^T, b13 takes dz, b2 takes s g; s takes
<d, y> + <g, b2>.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cudadent42.operations.interface import Exact, OnChunk, nothing
from cudadent42.operations.moe.reference import activate
from cudadent42.operations.moe_backward.inputs import MoeGradientInputs, differentiated, packed

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
    and its product with up, d, s, s g, dz, each slot's result and its gradient of its token, and sums over choices;
    with biases both products before them, too.
    """
    layout = inputs.forward.w13_layout
    through = partial(_through, activation=activation, layout=layout)
    hidden_states, w13 = inputs.forward.tensors[:2]
    dtype = hidden_states.dtype
    unit = torch.finfo(dtype).eps / 2
    smallest = torch.finfo(dtype).smallest_normal * unit * 2
    summed = _ACCUMULATED * 4 * max(*hidden_states.shape, w13.shape[1]) ** 0.5
    exact, spread = _zeros(inputs), _zeros(inputs)
    for part in _parts(inputs, torch.float64):
        x, g, up, down, score = part.x.abs(), part.incoming.abs(), part.w13.abs(), part.w2.abs(), part.score
        projected = part.x @ part.w13.T
        z = projected if part.w13_bias is None else projected + part.w13_bias
        unweighted = part.incoming @ part.w2
        off_z = unit * z.abs() + summed * (x @ up.T) + smallest
        if part.w13_bias is not None:
            off_z = off_z + unit * projected.abs() + summed * part.w13_bias.abs()
        off_d = summed * (g @ down) + unit * unweighted.abs()
        between, of_z = through(z, score * unweighted)
        off_between = (_EXPONENTIAL + _STEPS * unit) * between.abs()
        off_of_z = (2 * _EXPONENTIAL + _STEPS * unit) * through(z, (score * unweighted).abs())[1].abs()
        for shift in _shifts(off_z, activation, layout):
            other_between, other_of_z = through(z + shift, score * unweighted)
            off_between = off_between + (other_between - between).abs()
            off_of_z = off_of_z + (other_of_z - of_z).abs()
        off_weighted_d = off_d + _weighted_before(g, down, unit)
        off_of_z = off_of_z + through(z, score.abs() * off_weighted_d)[1].abs() + smallest
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
        projected = part.x @ part.w13.T
        z = (projected if part.w13_bias is None else projected + part.w13_bias).to(dtype).float()
        unweighted = part.incoming @ part.w2
        between, of_z = _through(z, unweighted * part.score, activation, inputs.forward.w13_layout)
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
    w13_bias: Tensor | None
    w2_bias: Tensor | None

    @property
    def of_score_by_bias(self) -> Tensor | float:
        """What w2's bias gives to the gradients of the routing weights."""
        return 0.0 if self.w2_bias is None else self.incoming @ self.w2_bias

    def add(
        self,
        to: list[Tensor],
        of_x: Tensor,
        of_w13: Tensor,
        of_w2: Tensor,
        of_score: Tensor,
        of_w13_bias: Tensor,
        of_w2_bias: Tensor,
    ) -> None:
        """To the gradients; to those of the biases where there are any."""
        to[0].index_add_(0, self.token, of_x)
        to[1][self.expert] += of_w13
        to[2][self.expert] += of_w2
        to[3][self.token, self.choice] = of_score
        if self.w13_bias is not None:
            to[4][self.expert] += of_w13_bias
            to[5][self.expert] += of_w2_bias


def _weighted_before(g: Tensor, down: Tensor, unit: float) -> Tensor:
    """How far s d is off, but for s, where a composition rounds each entry of s g before the product with w2: as
    autograd does of a result that was weighted after it. The gradient of s has no such rounding: no s is in its d.
    """
    return _DEVIATIONS * _DEVIATION * unit * (g.square() @ down.square()).sqrt()


def _parts(inputs: MoeGradientInputs, exact: torch.dtype) -> Iterator[_Part]:
    hidden_states, w13, w2, weights, ids = inputs.forward.tensors
    biases = inputs.forward.biases
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
            *((None, None) if biases is None else (bias[expert].to(exact) for bias in biases)),
        )

    return map(part, blocks)


def _through(z: Tensor, grad: Tensor, activation: str, layout: str) -> tuple[Tensor, Tensor]:
    """The activated values, and the gradient of z from theirs."""
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        between = activate(leaf, activation, layout)
        (of_z,) = torch.autograd.grad(between, leaf, grad)
    return between.detach(), of_z


def _shifts(off: Tensor, activation: str, layout: str) -> list[Tensor]:
    """z moved by as much as it may be off: gate and up one at a time."""
    if activation.endswith("_no_mul"):
        return [off]
    column = torch.arange(off.shape[1], dtype=torch.int64, device=off.device)
    of_gates = column % 2 == 0 if layout == "interleaved" else column < off.shape[1] // 2
    return [torch.where(of_gates, off, 0.0), torch.where(of_gates, 0.0, off)]


def _zeros(inputs: MoeGradientInputs) -> list[Tensor]:
    return [
        torch.zeros(tensor.shape, dtype=torch.float64, device=tensor.device)
        for tensor in differentiated(inputs.forward)
    ]
