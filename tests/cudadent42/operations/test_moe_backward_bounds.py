"""Gradients of experts have a bound for each token and expert: small faults of one are found, right results pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cudadent42.correctness.second_draw import is_marginal
from cudadent42.correctness.truth import Truth, find_truth, judge
from cudadent42.model.records import VerifiedCase
from cudadent42.operations.moe_backward.case import ROUTINGS, MoeBackwardCase, MoeTrainingStepCase
from cudadent42.operations.moe_backward.deviations import FACTOR
from cudadent42.operations.moe_backward.implementations import implementations
from cudadent42.operations.moe_backward.inputs import hard_inputs, input_sets, packed
from cudadent42.operations.moe_backward.reference import gradients_float64

pytestmark = pytest.mark.usefixtures("one_thread")

LARGE = MoeBackwardCase("large", "bf16", 2048, hidden=64, intermediate=64, experts=64, top_k=8)
FEW_EXPERTS = replace(LARGE, name="few", tokens=512, experts=8, top_k=2)
HIDDEN_STATES, W13, W2, TOPK_WEIGHTS = range(4)
ON_CPU = ("cudadent42", "cudadent42_recompute", "expert_loop", "grouped_mm")


class Judged:
    """A right result, and the truth on its inputs."""

    def __init__(self, case: MoeBackwardCase, name: str = "cudadent42") -> None:
        (inputs,) = input_sets(case, 2, 1, "cpu")
        self.truth: Truth = find_truth(case, inputs)
        made = next(item for item in implementations(case.operation) if item.name == name)
        self.right: list[Tensor] = list(made.prepare(case, inputs)())  # type: ignore[call-overload]

    def with_fault(self, which: int, block: int | slice, factor: float) -> VerifiedCase:
        wrong = list(self.right)
        wrong[which] = wrong[which].clone()
        wrong[which][block] *= factor
        return judge(self.truth, "wrong", wrong, "random")


@pytest.fixture(scope="module", params=["large", "few experts", "fp16", "composition"])
def a_result(request: pytest.FixtureRequest) -> Judged:
    made: dict[str, Callable[[], Judged]] = {
        "large": lambda: Judged(LARGE),
        "few experts": lambda: Judged(FEW_EXPERTS),
        "fp16": lambda: Judged(replace(FEW_EXPERTS, dtype="fp16")),
        "composition": lambda: Judged(LARGE, "expert_loop"),
    }
    return made[request.param]()


@pytest.mark.parametrize(
    ("which", "part", "factor"),
    [(HIDDEN_STATES, "hidden_states", 1.05), (W13, "w13", 1.03), (W2, "w2", 1.03)],
)
def test_one_block_that_is_scaled_fails(a_result: Judged, which: int, part: str, factor: float) -> None:
    count = len(a_result.right[which])
    for block in range(0, count, max(1, count // 4)):
        verdict = a_result.with_fault(which, block, factor)
        assert not verdict.passed, block
        assert f"in {part} of {'token' if which == HIDDEN_STATES else 'expert'} {block}" in verdict.detail
        (judged,) = (each for each in verdict.parts if each.part == part)
        assert (judged.block, judged.of_block.within) == (block, False)
        assert verdict.error is not None
        assert verdict.bound is not None
        assert (verdict.error.worst_row, verdict.bound.worst_row) == (
            judged.of_block.error,
            judged.of_block.bound,
        )


def test_the_routing_weights_of_one_token_that_are_scaled_fail(a_result: Judged) -> None:
    """Where the token's gradient is not made of terms that cancel: there its error is as large by rounding alone."""
    sizes = a_result.right[TOPK_WEIGHTS].float().norm(dim=1)
    for token in sizes.topk(len(sizes) // 2).indices[:: len(sizes) // 8].tolist():
        verdict = a_result.with_fault(TOPK_WEIGHTS, token, 1.05)
        assert f"in topk_weights of token {token}" in verdict.detail


@pytest.mark.parametrize("which", [HIDDEN_STATES, W13, W2, TOPK_WEIGHTS])
def test_a_gradient_that_is_a_hundredth_too_large_fails_for_good(a_result: Judged, which: int) -> None:
    verdict = a_result.with_fault(which, slice(None), 1.01)
    assert "RMS error" in verdict.detail
    assert "in all of" in verdict.detail
    assert not is_marginal(verdict)


def test_a_block_that_is_a_little_over_is_judged_on_other_values_too() -> None:
    result = Judged(FEW_EXPERTS)
    assert is_marginal(result.with_fault(W2, 3, 1.02))
    assert not is_marginal(result.with_fault(W2, 3, 1.05))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case_type", [MoeBackwardCase, MoeTrainingStepCase])
def test_right_results_pass(case_type: type[MoeBackwardCase], dtype: str, routing: str) -> None:
    sizes = {**vars(FEW_EXPERTS), "tokens": 160, "hidden": 96, "dtype": dtype, "routing": routing}
    case = case_type(**sizes)
    (inputs,) = input_sets(case, 0, 1, "cpu")
    truth = find_truth(case, inputs)
    for item in implementations(case.operation):
        if item.name in ON_CPU:
            verdict = judge(truth, item.name, item.prepare(case, inputs)(), "random")
            assert verdict.passed, (item.name, verdict.detail)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_what_rounds_most_is_within_the_bounds_of_blocks_on_hard_inputs(dtype: str) -> None:
    """PyTorch's loop; of single entries nothing is asked of it there."""
    loop = next(item for item in implementations("moe_backward") if item.name == "expert_loop")
    for hard in hard_inputs(dtype):
        if hard.kind in ("no_tokens", "no_valid_id", "no_valid_id_many"):
            continue  # no gradient of it
        inputs: Any = hard.make(0, "cpu")
        verdict = judge(
            find_truth(hard.case, inputs), hard.kind, loop.prepare(hard.case, inputs)(), hard.kind
        )
        assert len(verdict.parts) == 4, verdict.detail
        for part in verdict.parts:
            assert part.of_block.within, (hard.kind, part)
            assert part.of_all.within, (hard.kind, part)


def test_what_is_expected_is_what_comes() -> None:
    """Of a composition that rounds each step, a little less: numbers are seldom as badly rounded as can be."""
    (inputs,) = input_sets(LARGE, 0, 1, "cpu")
    exact = gradients_float64(inputs, LARGE.activation)
    loop = next(item for item in implementations("moe_backward") if item.name == "expert_loop")
    error = (packed(loop.prepare(LARGE, inputs)()).double() - exact.value).square().sum(dim=1)
    for blocks in exact.blocks[:3]:
        expected = float((blocks.limit / FACTOR).square().sum())
        came = float(error[blocks.first : blocks.first + blocks.rows * len(blocks.limit)].sum())
        assert 0.5 < (came / expected) ** 0.5 < 0.95, blocks.part


def test_blocks_are_the_rows_of_what_is_packed() -> None:
    case = replace(FEW_EXPERTS, tokens=19, hidden=16, intermediate=48, activation="swigluoai", bias=True)
    (inputs,) = input_sets(case, 0, 1, "cpu")
    exact = gradients_float64(inputs, case.activation)
    assert [each.part for each in exact.blocks] == [
        *("hidden_states", "w13", "w2", "topk_weights", "w13_bias", "w2_bias"),
    ]
    first = 0
    for each in exact.blocks:
        assert each.first == first
        assert len(each.limit) == {"token": case.tokens, "expert": case.experts}[each.owner]
        first += each.rows * len(each.limit)
    assert first == len(exact.value)


def test_errors_of_an_expert_that_a_token_has_twice_add_as_they_are() -> None:
    case = replace(FEW_EXPERTS, tokens=64)
    (inputs,) = input_sets(case, 0, 1, "cpu")
    ids = inputs.forward.topk_ids
    weights = torch.full_like(inputs.forward.topk_weights, 0.5)

    def limits(ids: Tensor) -> Tensor:
        forward = replace(inputs.forward, topk_ids=ids, topk_weights=weights)
        exact = gradients_float64(replace(inputs, forward=forward), case.activation)
        of_tokens = exact.blocks[0]
        return of_tokens.limit / exact.value[: case.tokens].norm(dim=1)

    once, twice = limits(ids), limits(ids[:, :1].expand_as(ids).contiguous())
    assert float(twice.median() / once.median()) == pytest.approx(1.0, rel=0.1)  # not 1 over the root of 2
