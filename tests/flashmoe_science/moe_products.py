"""For tests of grouped products: routings, operands with guards around them, and what is right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from moe_reference import ACTIVATIONS, factor_of

from flashmoe_science.cuda.moe.portable import Product
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.moe_arguments import W13Layout

_GUARD_ROWS = 3


def random_ids(tokens: int, top_k: int, experts: int, *, invalid: float = 0.0) -> torch.Tensor:
    """(tokens, top_k) int32: different experts for each token, a part of them replaced by ids outside the range."""
    ids = torch.rand(tokens, experts).argsort(dim=1)[:, :top_k].int()
    outside = torch.where(torch.rand(ids.shape) < 0.5, -1, experts).int()
    return torch.where(torch.rand(ids.shape) < invalid, outside, ids)


@dataclass(frozen=True)
class Routing:
    expert_offsets: torch.Tensor
    sorted_slots: torch.Tensor

    @property
    def rows(self) -> int:
        return len(self.sorted_slots)


def routing(ids: torch.Tensor, experts: int) -> Routing:
    """What the routing kernel makes of ids: slots by expert, ascending inside an expert; ids out of range left out."""
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    valid = (flat[order] >= 0) & (flat[order] < experts)
    slots = order[valid]
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    offsets[1:] = flat[slots].bincount(minlength=experts).cumsum(0)
    return Routing(offsets, slots.int())


@dataclass(frozen=True)
class Operands:
    """Of one product. NaN lies behind the input and the weights, and all over the output."""

    input: torch.Tensor
    weights: torch.Tensor
    output: torch.Tensor
    """Some rows longer than the product's."""
    ticket: torch.Tensor
    bias: torch.Tensor | None = None
    """(experts, rows of weights)."""

    def addresses(self, routed: Routing) -> tuple[int, ...]:
        """What a launch takes; the ticket is zero."""
        self.ticket.zero_()
        tensors = (
            self.input,
            self.weights,
            self.output,
            routed.expert_offsets,
            routed.sorted_slots,
            self.ticket,
        )
        bias = 0 if self.bias is None else self.bias.data_ptr()
        return (*(tensor.data_ptr() for tensor in tensors), bias)


def operands(problem: MoeProblem, product: Product, routed: Routing) -> Operands:
    up = product is Product.UP
    inner, columns = (problem.hidden, problem.intermediate) if up else (problem.intermediate, problem.hidden)
    weight_rows = problem.w13_rows if up else problem.hidden
    device = routed.sorted_slots.device

    def guarded(*shape: int) -> torch.Tensor:
        whole = torch.full((shape[0] + 1, *shape[1:]), torch.nan, dtype=problem.dtype, device=device)
        whole[:-1].normal_()
        return whole[:-1]

    weights = guarded(problem.experts, weight_rows, inner)
    weights.mul_(inner**-0.5)
    output_rows = routed.rows if up else problem.slots
    output = torch.full((output_rows + _GUARD_ROWS, columns), torch.nan, dtype=problem.dtype, device=device)
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    biased = problem.w13_biased if up else problem.w2_biased
    bias = guarded(problem.experts, weight_rows) if biased else None
    rows = guarded(problem.tokens if up else max(routed.rows, 1), inner)
    return Operands(rows, weights, output, ticket, bias)


def reference(problem: MoeProblem, product: Product, routed: Routing, given: Operands) -> torch.Tensor:
    """The output in float64, NaN where nothing may be written."""
    exact = torch.full(given.output.shape, torch.nan, dtype=torch.float64, device=given.output.device)
    bounds = routed.expert_offsets.tolist()
    for expert in range(problem.experts):
        begin, end = bounds[expert], bounds[expert + 1]
        slots = routed.sorted_slots[begin:end].long()
        bias = 0.0 if given.bias is None else given.bias[expert].double()
        if product is Product.UP:
            sums = given.input[slots // problem.top_k].double() @ given.weights[expert].double().T
            exact[begin:end] = activated(sums + bias, problem)
        else:
            exact[slots] = given.input[begin:end].double() @ given.weights[expert].double().T + bias
    return exact


def activated(sums: torch.Tensor, problem: MoeProblem) -> torch.Tensor:
    function = ACTIVATIONS[problem.activation]
    if not problem.gated:
        return function(sums)
    if problem.w13_layout is W13Layout.INTERLEAVED:
        gate, up = sums[:, 0::2], sums[:, 1::2]
    else:
        gate, up = sums.chunk(2, dim=1)
    return function(gate) * factor_of(up, problem.activation)


def assert_right(problem: MoeProblem, product: Product, routed: Routing, given: Operands) -> None:
    """Every row within two roundings of float64, relative to the row's scale; nothing else written."""
    exact = reference(problem, product, routed, given)
    actual = given.output.double()
    assert torch.equal(actual.isnan(), exact.isnan()), (
        f"{product}: rows left out, or written beside the output"
    )
    resolution = torch.finfo(problem.dtype).eps
    torch.testing.assert_close(actual, exact, rtol=resolution, atol=resolution / 8, equal_nan=True)
