"""Attention on the CPU: inputs whose values are extreme, special or chosen to round badly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from attention_reference import assert_as_exact_as_torch, exact_attention, torch_attention
from cpu_attention import attend, each_dtype, inputs, normal

from flashmoe_science.cpu import attention
from flashmoe_science.jit.host import InstructionSet
from instruction_sets import each_instruction_set


def rising_keys(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every block of keys raises the maximum."""
    query, key, value = inputs(1, 1, 1, 70, 400, 64, dtype)
    direction = torch.ones(64).to(dtype)
    return query.abs(), (key.abs() * 0.01 + direction * torch.linspace(0, 3, 400)[:, None]).to(dtype), value


def falling_keys(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = rising_keys(dtype)
    return query, key.flip(2).contiguous(), value


def dominant_key(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = inputs(1, 2, 2, 70, 300, 64, dtype)
    query = query.abs() + 0.5
    key[:, :, 131] = 20.0
    return query, key, value


def equal_rows(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = inputs(1, 2, 2, 70, 300, 64, dtype)
    return query, key[:, :, :1].expand(key.shape), value


def large_logits(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = inputs(1, 2, 2, 70, 300, 64, dtype)
    return query * 12, key * 12, value


def zeros(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = inputs(1, 2, 2, 70, 300, 64, dtype)
    return query * 0, key, value


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("make", [rising_keys, falling_keys, dominant_key, equal_rows, large_logits, zeros])
def test_adversarial_inputs(
    make: Callable[[torch.dtype], tuple[torch.Tensor, ...]],
    causal: bool,
    dtype: torch.dtype,
    instruction_set: InstructionSet,
) -> None:
    query, key, value = make(dtype)
    out = attend(query, key, value, causal, None, instruction_set)
    assert_as_exact_as_torch(out, query, key, value, causal)


@each_instruction_set
@each_dtype
def test_a_row_that_sees_one_key_returns_its_value(
    dtype: torch.dtype, instruction_set: InstructionSet
) -> None:
    """Its weight is exactly 1, whatever the score, and nothing is rounded."""
    for scale in (None, 50.0, 1e-3):
        query, key, value = inputs(1, 2, 2, 90, 90, 64, dtype)
        first = attend(query, key, value, True, scale, instruction_set)[:, :, 0]
        only = attend(query, key[:, :, :1], value[:, :, :1], False, scale, instruction_set)
        lone = attend(query[:, :, :1], key[:, :, :1], value[:, :, :1], False, scale, instruction_set)
        assert torch.equal(first, value[:, :, 0])
        assert torch.equal(only, value[:, :, :1].expand(query.shape))
        assert torch.equal(lone, value[:, :, :1])


@each_instruction_set
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_k", [1, 3, 9, 17, 300])
@pytest.mark.parametrize("shift", [0.0, 3.0, 12.0])
def test_rounding_is_pytorchs_whatever_the_size_of_scores(
    instruction_set: InstructionSet, head_dim: int, seqlen_k: int, shift: float
) -> None:
    """Scores about shift^2 * sqrt(head_dim), up to 2,300, all of which count; 799 rows, so that the RMS says something.

    Without the allowance of a few ulp that the other tests make.
    """
    query, key, value = inputs(1, 1, 1, 799, seqlen_k, head_dim, torch.float32)
    query, key = query / max(1.0, shift) + shift, key / max(1.0, shift) + shift
    exact, _ = exact_attention(query, key, value, False)
    error = attend(query, key, value, False, None, instruction_set).double() - exact
    theirs = torch_attention(query, key, value, False).double() - exact
    assert error.square().mean().sqrt() <= 2 * theirs.square().mean().sqrt()


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_weights_fall_below_the_smallest_normal_number(
    dtype: torch.dtype, instruction_set: InstructionSet, seqlen_q: int
) -> None:
    """A huge value, or an infinite one, at a score far below the maximum."""
    query = torch.ones(1, 1, seqlen_q, 8)
    key = torch.zeros(1, 1, 40, 8)
    value = torch.ones(1, 1, 40, 8)
    key[0, 0, 7:] = -25.0  # a score of -200
    value[0, 0, 7:] = torch.finfo(dtype).max
    tensors = [tensor.to(dtype) for tensor in (query, key, value)]
    out = attend(*tensors, False, 1.0, instruction_set)
    assert_as_exact_as_torch(out, *tensors, False, 1.0)
    assert torch.equal(out, torch.ones_like(out))


@each_instruction_set
@pytest.mark.parametrize("below", [85.0, 87.5, 90.0, 95.0, 102.0, 103.5, 104.5])
def test_subnormal_weights_are_right_to_the_last_subnormal(
    below: float, instruction_set: InstructionSet
) -> None:
    """The weight of the second key alone: the first has the maximum and a value of zero."""
    query = torch.ones(1, 1, 20, 8)
    key, value = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8)
    key[0, 0, 1] = -below / 8
    value[0, 0, 1] = 2.0**100
    out = attend(query, key, value, False, 1.0, instruction_set).double()
    exact, _ = exact_attention(query, key, value, False, 1.0)
    smallest = 2.0**-149 * 2.0**100
    assert ((out - exact).abs() <= 2e-5 * exact.abs() + smallest).all()


@each_instruction_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seqlen_q", [1, 20])
@pytest.mark.parametrize("top", [2.0e38, 2.9e38, 3.3e38])
def test_scores_near_the_largest_number(
    dtype: torch.dtype, instruction_set: InstructionSet, seqlen_q: int, top: float
) -> None:
    """The largest times log2(e) is infinite, and so is its distance from one below zero."""
    query = torch.zeros(1, 1, seqlen_q, 8)
    query[..., 0] = 1.0
    key = torch.zeros(1, 1, 70, 8)
    key[0, 0, :, 0] = torch.linspace(-1, 1, 70) * top
    key[0, 0, 69, 0] = key[0, 0, 68, 0]
    value = normal(1, 1, 70, 8, seed=3)
    tensors = [tensor.to(dtype) for tensor in (query, key, value)]
    for causal in (False, True):
        out, lse = attention.forward(
            *tensors,
            causal=causal,
            softmax_scale=1.0,
            return_lse=True,
            instruction_set=instruction_set,
        )
        assert_as_exact_as_torch(out, *tensors, causal, 1.0)
        assert lse is not None
        torch.testing.assert_close(lse.double(), exact_attention(*tensors, causal, 1.0)[1], atol=0, rtol=1e-6)


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seqlen_q", [1, 90])
def test_a_scale_of_zero_times_what_is_not_finite_is_nan(
    dtype: torch.dtype, causal: bool, instruction_set: InstructionSet, seqlen_q: int
) -> None:
    """0 * infinity is NaN; finite scores become 0, and masked keys stay masked."""
    cases = list(itertools.product((math.nan, math.inf, -math.inf), (0, 1), (0, 40, 66)))
    query, key, value = inputs(len(cases), 2, 1, seqlen_q, 90, 24, dtype)
    for index, (special, which, position) in enumerate(cases):
        (query, key)[which][index, 0, position if which or seqlen_q > 1 else 0, 5] = special
    out = attend(query, key, value, causal, 0.0, instruction_set)
    exact, _ = exact_attention(query, key, value, causal, 0.0)
    for index, case in enumerate(cases):
        assert torch.equal(out[index].isnan(), exact[index].isnan()), case
    clean = exact.isfinite()
    torch.testing.assert_close(out.double()[clean], exact[clean], atol=2e-2, rtol=2e-2)


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(90, 90), (70, 141), (141, 70)])
def test_special_values_spread_as_in_the_definition(
    causal: bool, dtype: torch.dtype, instruction_set: InstructionSet, seqlen_q: int, seqlen_k: int
) -> None:
    """A batch element for each special value, tensor and position: only what the definition says changes."""
    cases = list(itertools.product((math.nan, math.inf, -math.inf), range(3), (3, 40, 66)))
    query, key, value = inputs(len(cases), 2, 1, seqlen_q, seqlen_k, 24, dtype)
    for index, (special, which, position) in enumerate(cases):
        (query, key, value)[which][index, 0, position, 5] = special
    out = attend(query, key, value, causal, None, instruction_set)
    exact, _ = exact_attention(query, key, value, causal)
    for index, case in enumerate(cases):
        assert torch.equal(out[index].isnan(), exact[index].isnan()), case
        assert torch.equal(out[index].isinf(), exact[index].isinf()), case
    clean = exact.isfinite()
    torch.testing.assert_close(out.double()[clean], exact[clean], atol=2e-2, rtol=2e-2)


@each_instruction_set
@each_dtype
def test_special_values_of_a_lone_query(dtype: torch.dtype, instruction_set: InstructionSet) -> None:
    cases = list(itertools.product((math.nan, math.inf, -math.inf), range(3), (0, 40, 66)))
    query, key, value = inputs(len(cases), 2, 2, 1, 67, 24, dtype)
    for index, (special, which, position) in enumerate(cases):
        (query, key, value)[which][index, 0, position if which else 0, 5] = special
    out = attend(query, key, value, False, None, instruction_set)
    exact, _ = exact_attention(query, key, value, False)
    for index, case in enumerate(cases):
        assert torch.equal(out[index].isnan(), exact[index].isnan()), case
        assert torch.equal(out[index].isinf(), exact[index].isinf()), case
    clean = exact.isfinite()
    torch.testing.assert_close(out.double()[clean], exact[clean], atol=2e-2, rtol=2e-2)


@each_dtype
@pytest.mark.parametrize(
    ("heads", "seqlen_q", "seqlen_k", "head_dim"),
    [(1, 15, 15, 256), (1, 15, 128, 256), (2, 1, 64, 128), (8, 128, 256, 64), (4, 64, 512, 256)],
)
def test_error_rms_over_many_draws_is_at_most_1_15_of_pytorchs(
    dtype: torch.dtype, heads: int, seqlen_q: int, seqlen_k: int, head_dim: int
) -> None:
    """Pooled over a batch: of one draw of few rows either side's RMS varies by tens of per cent."""
    query, key, value = inputs(24, heads, heads, seqlen_q, seqlen_k, head_dim, dtype)
    exact, _ = exact_attention(query, key, value, False)
    error = (attend(query, key, value).double() - exact).square().mean().sqrt()
    their_error = (torch_attention(query, key, value, False).double() - exact).square().mean().sqrt()
    assert error <= 1.15 * their_error


@each_instruction_set
def test_nan_with_a_payload_stays_nan(instruction_set: InstructionSet) -> None:
    """Exponent arithmetic on the bits of a NaN must not turn it into a number."""
    query, key, value = inputs(1, 1, 1, 20, 20, 16, torch.float32)
    for payload in (0x7FC00001, 0x7FC001FF, 0x7F800001, -0x3FFFFF):
        bad = query.clone()
        bad.view(torch.int32)[0, 0, 7, 3] = payload
        out = attend(bad, key, value, False, None, instruction_set)
        rows = out.isnan().any(-1)[0, 0]
        assert rows.nonzero().flatten().tolist() == [7]
        assert out[0, 0, 7].isnan().all()


@each_dtype
def test_infinite_score_below_zero_is_a_weight_of_zero(dtype: torch.dtype) -> None:
    query, key, value = inputs(1, 1, 1, 5, 70, 16, dtype)
    query = query.abs() + 0.1
    key[0, 0, 9] = -math.inf
    kept = [k for k in range(70) if k != 9]
    expected = attend(query, key[:, :, kept], value[:, :, kept])
    torch.testing.assert_close(attend(query, key, value), expected, atol=1e-2, rtol=1e-2)
