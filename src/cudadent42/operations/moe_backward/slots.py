"""A mixture of experts' slots, some of an expert at a time, and what passes through its activation. A slot is one of a
token's choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cudadent42.operations.moe.reference import activate
from cudadent42.operations.moe_backward.inputs import MoeGradientInputs

_CHUNK_ENTRIES = {"cpu": 1 << 19, "cuda": 1 << 25}
"""Entries of an expert's projections held at a time, some forty such in float64."""


@dataclass(frozen=True)
class Part:
    """Some slots of an expert, as numbers of one floating type."""

    expert: int
    token: Tensor
    choice: Tensor
    x: Tensor
    incoming: Tensor
    score: Tensor
    """(slots, 1)."""
    times: Tensor
    """(slots, 1): how often the slot's token chose this expert."""
    choices: int
    """Of a token."""
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


def by_expert(inputs: MoeGradientInputs, exact: torch.dtype) -> Iterator[Part]:
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

    def part(slots: tuple[int, Tensor, Tensor]) -> Part:
        expert, token, choice = slots
        return Part(
            expert,
            token,
            choice,
            hidden_states[token].to(exact),
            inputs.output_gradient[token].to(exact),
            weights[token, choice, None].to(exact),
            (ids[token] == expert).sum(dim=1, keepdim=True).to(exact),
            ids.shape[1],
            w13[expert].to(exact),
            w2[expert].to(exact),
            *((None, None) if biases is None else (bias[expert].to(exact) for bias in biases)),
        )

    return map(part, blocks)


def through(z: Tensor, grad: Tensor, activation: str, layout: str) -> tuple[Tensor, Tensor]:
    """The activated values, and the gradient of z from theirs."""
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        between = activate(leaf, activation, layout)
        (of_z,) = torch.autograd.grad(between, leaf, grad)
    return between.detach(), of_z


def shifts(off: Tensor, activation: str, layout: str) -> list[Tensor]:
    """z moved by as much as it may be off: gate and up one at a time."""
    if activation.endswith("_no_mul"):
        return [off]
    column = torch.arange(off.shape[1], dtype=torch.int64, device=off.device)
    of_gates = column % 2 == 0 if layout == "interleaved" else column < off.shape[1] // 2
    return [torch.where(of_gates, off, 0.0), torch.where(of_gates, 0.0, off)]
