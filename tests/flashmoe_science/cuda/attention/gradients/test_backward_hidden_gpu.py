"""What NaN and infinity do on the GPU at hand where a row does not see them, by every kernel that takes a call."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from attention_backward import Backward
from backward_on_gpu import ALL, KINDS, backward, case_of, choices_of

from flashmoe_science.cuda.attention.gradients.problem import GradientKind
from flashmoe_science.cuda.choice import Choice

pytestmark = pytest.mark.gpu


_TAKEN_BY_HOPPER = {
    GradientKind.SHORT: range(65),
    GradientKind.HOPPER: range(129),
    GradientKind.TWO_PASS: range(129, 257),
    GradientKind.PORTABLE: range(257),
}
"""Head dims."""


def choices_or_skip(case: Backward, kind: GradientKind) -> list[Choice]:
    """Of a call with all gradients, which no kernel of an H200 skips that should take it."""
    choices = choices_of(case, ALL, kind)
    if not choices:
        assert (
            torch.cuda.get_device_capability() != (9, 0) or case.query.shape[-1] not in _TAKEN_BY_HOPPER[kind]
        )
        pytest.skip(f"{kind.value} does not take this here")
    return choices


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.xfail(reason="0 x NaN in a tile at the diagonal", strict=True))
        if kind is not GradientKind.PORTABLE
        else kind
        for kind in KINDS
    ],
)
def test_what_a_row_does_not_see_reaches_no_gradient_of_it(kind: GradientKind, head_dim: int) -> None:
    case = case_of((200, 203) if kind is GradientKind.SHORT else (300, 303), head_dim)
    choices = choices_or_skip(case, kind)
    keys = case.key.clone()
    keys[:, :, -1, 5] = math.nan  # seen by the last row alone
    for choice in choices:
        clean: Any = backward(case, choice=choice)
        spoilt: Any = backward(dataclasses.replace(case, key=keys), choice=choice)
        assert torch.equal(spoilt[0][:, :, :-1], clean[0][:, :, :-1]), choice
        assert spoilt[0][:, :, -1].isnan().any(), choice


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=pytest.mark.xfail(reason="0 x NaN in a tile with rows that have keys", strict=True)
        )
        if kind is not GradientKind.PORTABLE
        else kind
        for kind in KINDS
    ],
)
def test_rows_without_keys_reach_no_gradient(kind: GradientKind, head_dim: int, bad: float) -> None:
    """Whatever such rows hold. Those with keys begin within a tile."""
    rows, keys = (256, 139) if kind is GradientKind.SHORT else (417, 300)
    case, without = case_of((rows, keys), head_dim), rows - keys
    choices = choices_or_skip(case, kind)
    query, grad = case.query.clone(), case.grad_output.clone()
    query[:, :, :without] = bad
    grad[:, :, :without] = bad
    for choice in choices:
        clean: Any = backward(case, choice=choice)
        for spoilt in (
            dataclasses.replace(case, query=query),
            dataclasses.replace(case, grad_output=grad),
        ):
            got: Any = backward(spoilt, choice=choice)
            assert (got[0][:, :, :without] == 0).all(), choice
            assert all(torch.equal(*pair) for pair in zip(got, clean, strict=True)), choice


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_with_keys_have_the_same_gradient_beside_rows_without(kind: GradientKind, head_dim: int) -> None:
    """Of the queries: that of the keys is another matter on Hopper, see above."""
    rows, keys = (256, 139) if kind is GradientKind.SHORT else (417, 300)
    case, without = case_of((rows, keys), head_dim), rows - keys
    choices = choices_or_skip(case, kind)
    query = case.query.clone()
    query[:, :, :without] = math.nan
    for choice in choices:
        clean: Any = backward(case, choice=choice)
        got: Any = backward(dataclasses.replace(case, query=query), choice=choice)
        assert torch.equal(got[0][:, :, without:], clean[0][:, :, without:]), choice
