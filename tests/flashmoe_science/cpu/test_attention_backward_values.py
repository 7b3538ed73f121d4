"""Attention's gradients on the CPU: inputs whose values are extreme or special."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from attention_gradients import Case, assert_within_bounds, by_definition, random_case
from attention_reference import visible_keys
from cpu_attention import ALL, backward, each_dtype, each_mask, forward, gradients_of

from flashmoe_science.jit.host import InstructionSet
from instruction_sets import each_instruction_set


def dominant_key(case: Case) -> Case:
    key = case.key.clone()
    key[:, :, 31] = 20.0
    return replace(case, query=case.query.abs() + 0.5, key=key)


def large_logits(case: Case) -> Case:
    return replace(case, query=case.query * 12, key=case.key * 12)


def equal_keys(case: Case) -> Case:
    return replace(case, key=case.key[:, :, :1].expand(case.key.shape))


def zero_queries(case: Case) -> Case:
    return replace(case, query=case.query * 0)


def large_values(case: Case) -> Case:
    return replace(case, value=case.value * 64)


def large_gradients(case: Case) -> Case:
    return replace(case, grad_output=case.grad_output * 2.0**10)


def small_gradients(case: Case) -> Case:
    return replace(case, grad_output=case.grad_output * 2.0**-14)


@each_instruction_set
@each_dtype
@each_mask
@pytest.mark.parametrize(
    "change",
    [dominant_key, large_logits, equal_keys, zero_queries, large_values, large_gradients, small_gradients],
)
def test_adversarial_inputs(
    change: object, causal: bool, dtype: torch.dtype, instruction_set: InstructionSet
) -> None:
    assert callable(change)
    case = change(random_case(1, 2, 2, 70, 150, 64, dtype, causal=causal))
    output, lse = forward(case, instruction_set)
    assert_within_bounds(case, output, lse, backward(case, output, lse, ALL, instruction_set))


@each_dtype
@each_mask
def test_no_gradient_of_the_output_gives_exact_zeros(dtype: torch.dtype, causal: bool) -> None:
    case = random_case(1, 4, 2, 70, 90, 64, dtype, causal=causal)
    for gradient in gradients_of(replace(case, grad_output=torch.zeros_like(case.grad_output))):
        assert (gradient == 0).all()


@each_instruction_set
@each_dtype
def test_rows_without_keys_have_no_part_in_any_gradient(
    dtype: torch.dtype, instruction_set: InstructionSet
) -> None:
    """Whatever they, and what arrives for them, hold."""
    case = random_case(1, 2, 1, 100, 40, 32, dtype, causal=True, grad_lse=True)
    expected = gradients_of(case, instruction_set)
    rows = ~visible_keys(100, 40, True).any(-1)
    assert int(rows.sum()) == 60
    assert (expected[0][:, :, rows] == 0).all()
    output, lse = forward(case, instruction_set)
    assert case.grad_lse is not None
    for special in (math.nan, math.inf):
        query, grad_output, grad_lse = case.query.clone(), case.grad_output.clone(), case.grad_lse.clone()
        query[:, :, rows] = special
        grad_output[:, :, rows] = special
        grad_lse[:, :, rows] = special
        changed = replace(case, query=query, grad_output=grad_output, grad_lse=grad_lse)
        gradients = backward(changed, output, lse, ALL, instruction_set)
        for gradient, clean in zip(gradients, expected, strict=True):
            assert gradient is not None
            torch.testing.assert_close(gradient, clean, rtol=1e-2, atol=1e-3)
        assert gradients[0] is not None
        assert (gradients[0][:, :, rows] == 0).all()


@each_mask
@each_dtype
def test_empty_sequences_give_zeros(dtype: torch.dtype, causal: bool) -> None:
    for batch, heads, seqlen_q, seqlen_k in [
        (0, 2, 3, 4),
        (2, 0, 3, 4),
        (1, 2, 0, 5),
        (1, 2, 5, 0),
        (1, 2, 0, 0),
    ]:
        case = random_case(batch, heads, heads, seqlen_q, seqlen_k, 64, dtype, causal=causal)
        for gradient, tensor in zip(gradients_of(case), (case.query, case.key, case.value), strict=True):
            assert gradient.shape == tensor.shape
            assert (gradient == 0).all()


@each_instruction_set
@each_dtype
@each_mask
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(90, 90), (71, 141), (141, 70)])
def test_special_values_spread_as_in_the_definition(
    causal: bool, dtype: torch.dtype, instruction_set: InstructionSet, seqlen_q: int, seqlen_k: int
) -> None:
    """A batch element for each special value, tensor and position."""
    cases = list(itertools.product((math.nan, math.inf), range(4), (3, 40, 66)))
    case = random_case(len(cases), 1, 1, seqlen_q, seqlen_k, 24, dtype, causal=causal)
    for index, (special, which, position) in enumerate(cases):
        (case.query, case.key, case.value, case.grad_output)[which][index, 0, position, 5] = special
    gradients = gradients_of(case, instruction_set)
    for gradient, expected in zip(gradients, by_definition(case), strict=True):
        for index, which in enumerate(cases):
            assert torch.equal(gradient[index].isfinite(), expected[index].isfinite()), which
        clean = expected.isfinite()
        torch.testing.assert_close(gradient.double()[clean], expected[clean], atol=5e-2, rtol=2e-2)


@each_instruction_set
@each_dtype
def test_a_key_of_weight_zero_takes_no_gradient(dtype: torch.dtype, instruction_set: InstructionSet) -> None:
    """Its score is minus infinity, in an odd number of rows (which bf16 takes in pairs)."""
    case = random_case(1, 1, 1, 5, 70, 16, dtype)
    case = replace(case, query=case.query.abs() + 0.1)
    case.key[0, 0, 9] = -math.inf
    _, _, grad_value = gradients_of(case, instruction_set)
    kept = [k for k in range(70) if k != 9]
    expected = gradients_of(
        replace(case, key=case.key[:, :, kept], value=case.value[:, :, kept]), instruction_set
    )
    assert (grad_value[0, 0, 9] == 0).all()
    torch.testing.assert_close(grad_value[:, :, kept], expected[2], atol=1e-2, rtol=1e-2)
