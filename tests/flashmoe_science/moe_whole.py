"""For tests of a whole mixture of experts: arguments with guards around them, and what is right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from moe_products import activated

from flashmoe_science.cuda.moe.problem import MoeProblem

_GUARD_ROWS = 2


@dataclass(frozen=True)
class Arguments:
    """NaN lies behind the hidden states, the weights and their biases, and all over the output."""

    hidden_states: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    output: torch.Tensor
    """Some rows longer than the call's."""
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None

    def addresses(self) -> tuple[int, ...]:
        """As a launch takes them."""
        five = self.hidden_states, self.w13, self.w2, self.topk_weights, self.topk_ids
        biases = (each for each in (self.w13_bias, self.w2_bias) if each is not None)
        return tuple(each.data_ptr() for each in (*five, *biases, self.output))


def arguments(problem: MoeProblem, ids: torch.Tensor) -> Arguments:
    """Normal random numbers, the weights scaled so that every product keeps the size of its input."""
    device = ids.device

    def guarded(*shape: int) -> torch.Tensor:
        whole = torch.full((shape[0] + 1, *shape[1:]), torch.nan, dtype=problem.dtype, device=device)
        whole[:-1].normal_()
        return whole[:-1]

    w13 = guarded(problem.experts, problem.w13_rows, problem.hidden)
    w2 = guarded(problem.experts, problem.hidden, problem.intermediate)
    w13_bias = guarded(problem.experts, problem.w13_rows) if problem.w13_biased else None
    w2_bias = guarded(problem.experts, problem.hidden) if problem.w2_biased else None
    return Arguments(
        guarded(problem.tokens, problem.hidden),
        w13.mul_(problem.hidden**-0.5),
        w2.mul_(problem.intermediate**-0.5),
        torch.rand(problem.tokens, problem.top_k, device=device),
        ids.to(torch.int64 if problem.ids64 else torch.int32).contiguous(),
        torch.full(
            (problem.tokens + _GUARD_ROWS, problem.hidden), torch.nan, dtype=problem.dtype, device=device
        ),
        w13_bias,
        w2_bias,
    )


def intermediate(problem: MoeProblem, given: Arguments) -> torch.Tensor:
    """(slots, intermediate) in float64, NaN for slots without an expert."""
    ids = given.topk_ids.flatten().long()
    exact = torch.full(
        (problem.slots, problem.intermediate), torch.nan, dtype=torch.float64, device=ids.device
    )
    for expert in range(problem.experts):
        slots = (ids == expert).nonzero().flatten()
        if len(slots):
            sums = given.hidden_states[slots // problem.top_k].double() @ given.w13[expert].double().T
            if given.w13_bias is not None:
                sums = sums + given.w13_bias[expert].double()
            exact[slots] = activated(sums, problem)
    return exact


def reference(problem: MoeProblem, given: Arguments) -> torch.Tensor:
    """(tokens, hidden) in float64, the intermediate values rounded as the kernels round them."""
    ids = given.topk_ids.flatten().long()
    middle = intermediate(problem, given).to(problem.dtype).double()
    rows = torch.zeros(problem.slots, problem.hidden, dtype=torch.float64, device=ids.device)
    for expert in range(problem.experts):
        slots = (ids == expert).nonzero().flatten()
        if len(slots):
            rows[slots] = middle[slots] @ given.w2[expert].double().T
            if given.w2_bias is not None:
                rows[slots] += given.w2_bias[expert].double()
    weighted = rows * given.topk_weights.flatten().double()[:, None]
    return weighted.view(problem.tokens, problem.top_k, problem.hidden).sum(1)


def assert_right(problem: MoeProblem, given: Arguments, *, roundings: float = 2.0) -> None:
    """Every value within so many roundings of float64, relative to the output's scale; nothing written beside it."""
    assert given.output[problem.tokens :].isnan().all(), "written behind the output"
    actual, exact = given.output[: problem.tokens].double(), reference(problem, given)
    resolution = torch.finfo(problem.dtype).eps * roundings
    scale = max(1.0, float(exact.abs().max())) if exact.numel() else 1.0
    torch.testing.assert_close(actual, exact, rtol=resolution, atol=resolution * scale / 4)
