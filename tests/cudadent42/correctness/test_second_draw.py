"""A result a little over a bound is decided by other values; one that is far off, by the first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cudadent42.correctness.second_draw import GROSS_FACTOR, MOST_DRAWS, decided, is_marginal, wrong_result
from cudadent42.correctness.truth import Truth, find_truth, judge
from cudadent42.model.records import VerifiedCase
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention.inputs import random_inputs

CASE = AttentionCase("small", "fp32", 1, 2, 2, 64, 64, 32)


@pytest.fixture(scope="module")
def truth() -> Truth:
    return find_truth(CASE, random_inputs(CASE, 0, 0, "cpu"))


def off(truth: Truth, bounds: float) -> VerifiedCase:
    """The verdict on a result with one entry that is off by so many bounds."""
    result: Tensor = truth.reference.clone()
    result[0, 0, 0, 0] += bounds * truth.bound.max * truth.reference.square().mean().sqrt()
    return judge(truth, "kernel", result.float(), "random")


def test_what_is_marginal(truth: Truth) -> None:
    assert not is_marginal(off(truth, 0.0))
    assert is_marginal(off(truth, 1.2))
    assert not is_marginal(off(truth, 20 * GROSS_FACTOR))
    less_precise = judge(truth, "kernel", truth.reference.half().float(), "random")
    assert not less_precise.passed
    assert not is_marginal(less_precise)
    tilted = truth.reference * (1 + 1.5 * truth.bound.rms)  # by the RMS alone
    assert not judge(truth, "kernel", tilted.float(), "random").passed
    assert not is_marginal(judge(truth, "kernel", tilted.float(), "random"))
    nothing = judge(truth, "kernel", torch.full_like(truth.pytorch, torch.nan), "random")
    assert not is_marginal(nothing)


def test_a_marginal_result_is_wrong_when_it_is_so_again(truth: Truth) -> None:
    asked = []

    def again(bounds: float) -> list[VerifiedCase]:
        asked.append(bounds)
        return [off(truth, bounds)]

    marginal, gross = off(truth, 1.2), off(truth, 20 * GROSS_FACTOR)
    assert wrong_result([off(truth, 0.0)], lambda: again(5.0)) is None
    assert wrong_result([off(truth, 0.0), gross, marginal], lambda: again(0.0)) == gross
    assert asked == []
    assert wrong_result([marginal], lambda: again(0.0)) is None
    assert wrong_result([marginal], lambda: []) == marginal
    twice = wrong_result([marginal], lambda: again(1.3))
    assert twice is not None
    assert "and on the values before: max error" in twice.detail
    assert asked == [0.0, 1.3, 1.3]


def test_the_audit_draws_as_often_as_verify(truth: Truth) -> None:
    """An honest kernel may be marginal twice in a row."""
    marginal = off(truth, 1.2)

    def wrong(*bounds: float) -> tuple[VerifiedCase | None, list[float]]:
        left = list(bounds)
        return wrong_result([marginal], lambda: [off(truth, left.pop(0))] if left else []), left

    assert wrong(1.3, 0.0, 5.0) == (None, [5.0])
    thrice, left = wrong(1.3, 1.4, 0.0)
    assert thrice is not None
    assert thrice.detail.count("on the values before") == MOST_DRAWS - 1
    assert left == [0.0]
    gross, left = wrong(20 * GROSS_FACTOR, 0.0)
    assert gross is not None
    assert left == [0.0]


def test_the_verdict_tells_of_both_draws(truth: Truth) -> None:
    marginal = off(truth, 1.2)
    passed = decided(marginal, off(truth, 0.0))
    assert passed.passed
    assert marginal.detail in passed.detail
    failed = decided(marginal, replace(marginal, detail="worse"))
    assert not failed.passed
    assert failed.detail == f"worse; and on the values before: {marginal.detail}"
