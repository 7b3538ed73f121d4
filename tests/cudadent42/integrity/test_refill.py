"""Inputs get other values in the same memory; an output belongs to the values of now or it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cudadent42.correctness.forms import wrong_kind
from cudadent42.integrity.outputs import copies, grossly_differs, same
from cudadent42.integrity.refill import FreshInputs
from cudadent42.model.cases import Case
from cudadent42.operations import definition, numerics
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention_backward.case import AttentionBackwardCase, AttentionTrainingStepCase
from cudadent42.operations.moe.case import MoeCase

SIZES = ("fp32", 1, 2, 2, 24, 24, 32)
CASES: list[tuple[Case, set[str]]] = [
    (AttentionCase("a", *SIZES), {"query", "key", "value"}),
    (AttentionBackwardCase("b", *SIZES), {"output_gradient"}),
    (AttentionTrainingStepCase("c", *SIZES), {"query", "key", "value", "output_gradient"}),
    (MoeCase("d", "bf16", 6, 16, 8, 4, 2), {"hidden_states", "topk_weights", "topk_ids"}),
]


@pytest.mark.parametrize(("case", "written"), CASES, ids=lambda item: getattr(item, "operation", ""))
def test_what_changes_between_calls_is_written_and_nothing_else(case: Case, written: set[str]) -> None:
    sets = numerics(case).input_sets(case, 0, 2, "cpu")
    inputs = FreshInputs(case, sets)
    inputs.refill(1)
    before = [
        {name: tensor.clone() for name, tensor in vars(each).items() if isinstance(tensor, torch.Tensor)}
        for each in sets
    ]
    inputs.refill(2)
    for old, each in zip(before, sets, strict=True):
        assert {name for name in old if not torch.equal(old[name], getattr(each, name))} == written
    earlier = inputs.earlier(1)
    assert len(earlier) == 1
    assert all(torch.equal(before[1][name], getattr(earlier[0], name)) for name in before[1])
    inputs.refill(1)
    assert all(torch.equal(before[0][name], getattr(sets[0], name)) for name in before[0])


def test_a_write_by_somebody_else_is_seen() -> None:
    case, _ = CASES[0]
    inputs = FreshInputs(case, numerics(case).input_sets(case, 0, 2, "cpu"))
    inputs.refill(1)
    assert not inputs.changed
    inputs.sets[1].tensors[2][0, 0, 0, 0] += 1
    assert inputs.changed


@pytest.mark.parametrize("case", [case for case, _ in CASES], ids=lambda case: case.operation)
def test_shapes_that_no_plan_shows(case: Case) -> None:
    import random

    unplanned: Callable[..., list[Case]] | None = definition(case.operation).unplanned  # type: ignore[assignment]
    assert unplanned is not None
    shapes = unplanned([case], random.Random(3), 20)
    assert len(shapes) == 20
    assert all(type(each) is type(case) for each in shapes)
    assert all(each.tokens != case.tokens for each in shapes)
    assert all(0 < each.flops <= case.flops for each in shapes)


def test_a_result_of_other_inputs_is_far_off_and_rounding_is_not() -> None:
    reference = torch.randn(64, 64)
    assert not grossly_differs(reference.bfloat16(), reference)
    assert grossly_differs(torch.randn(64, 64), reference)
    assert grossly_differs(torch.zeros(64, 64), reference)
    assert grossly_differs(torch.full((64, 64), float("nan")), reference)
    assert grossly_differs(reference[:1], reference)


def test_an_output_that_changes_behind_its_call() -> None:
    output = torch.randn(8)
    before = copies((output, output * 2))
    pair = (output, output * 2)
    assert same(pair, before)
    output[0] += 1
    assert not same(pair, before)


def test_only_plain_tensors_are_results() -> None:
    class Lazy(torch.Tensor):
        pass

    assert wrong_kind(torch.ones(2)) == ""
    assert wrong_kind((torch.ones(2), torch.ones(2))) == ""
    assert "Lazy" in wrong_kind(torch.ones(2).as_subclass(Lazy))
    assert "sparse" in wrong_kind(torch.ones(2, 2).to_sparse())
