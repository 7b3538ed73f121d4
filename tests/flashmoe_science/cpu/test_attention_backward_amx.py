"""Gradients on the matrix unit: by loops in place of its instructions, and by these where the processor has them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from attention_gradients import (
    Case,
    assert_as_exact_as_torch,
    assert_rms_as_of_torch,
    assert_within_bounds,
    by_definition,
    exact_gradients,
    random_case,
)
from cpu_attention import ALL, GuardedMemory, Threads, backward, each_mask, forward, gradients_of
from hypothesis import given
from hypothesis import strategies as st
from matrix_unit import UNITS, code_of, code_of_pairs

from flashmoe_science.cpu import attention_backward, library
from flashmoe_science.gradients import Needs

BF16 = torch.bfloat16
KERNEL = "attention_backward", "flashmoe_attention_backward_method"


@pytest.fixture(scope="module", autouse=True, params=UNITS)
def unit(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every backward pass takes the code for the matrix unit."""
    instruction_set, macros = code_of(request.param)
    load = library.load_function
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_backward, "_plans", {})
        patch.setattr(attention_backward, "_thread", attention_backward._OfThread())
        patch.setattr(attention_backward, "_load", lambda *_: load(*KERNEL, instruction_set, macros))
        yield request.param


@given(
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2)]),
    seqlen_q=st.one_of(st.integers(1, 150), st.sampled_from([32, 64, 96, 128])),
    seqlen_k=st.one_of(st.integers(1, 200), st.sampled_from([32, 64, 96, 128])),
    head_dim=st.sampled_from([32, 64, 72, 96, 128]),
    causal=st.booleans(),
    grad_lse=st.booleans(),
    softmax_scale=st.sampled_from([None, 0.3, -0.2, 0.0]),
    needs=st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**30),
)
def test_any_shape_mask_scale_and_need(
    batch: int,
    heads: tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    causal: bool,
    grad_lse: bool,
    softmax_scale: float | None,
    needs: tuple[bool, bool, bool],
    threads: int,
    seed: int,
) -> None:
    case = random_case(
        *(batch, *heads, seqlen_q, seqlen_k, head_dim, BF16),
        causal=causal,
        softmax_scale=softmax_scale,
        grad_lse=grad_lse,
        seed=seed,
    )
    output, lse = forward(case)
    with Threads(threads):
        gradients = backward(case, output, lse, Needs(*needs))
    with Threads(1):
        alone = backward(case, output, lse, ALL)
    assert_within_bounds(case, output, lse, gradients)
    for gradient, every, needed in zip(gradients, alone, needs, strict=True):
        assert (gradient is not None) == needed
        assert gradient is None or (every is not None and torch.equal(gradient, every))


@each_mask
@pytest.mark.parametrize(
    ("heads", "seqlen_q", "seqlen_k", "head_dim"),
    [(2, 15, 15, 128), (2, 64, 128, 64), (4, 128, 256, 64), (1, 256, 256, 256)],
)
def test_error_over_many_draws_against_pytorchs(
    causal: bool, heads: int, seqlen_q: int, seqlen_k: int, head_dim: int
) -> None:
    """As on any other processor: RMS at most 1.15 times, worst element and worst row at most twice."""
    case = random_case(12, heads, heads, seqlen_q, seqlen_k, head_dim, BF16, causal=causal)
    output, lse = forward(case)
    gradients = backward(case, output, lse)
    exact = exact_gradients(case, output, lse)
    assert_as_exact_as_torch(case, gradients, exact)
    assert_rms_as_of_torch(case, gradients, exact)


@each_mask
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(90, 90), (71, 141), (141, 70), (31, 33)])
def test_special_values_spread_as_in_the_definition(causal: bool, seqlen_q: int, seqlen_k: int) -> None:
    """A batch element for each special value, tensor and position. Padding multiplies none of them by zero."""
    positions = [3, min(seqlen_q, seqlen_k) - 1, min(40, seqlen_q - 1, seqlen_k - 1)]
    cases = list(itertools.product((math.nan, math.inf), range(4), positions))
    case = random_case(len(cases), 1, 1, seqlen_q, seqlen_k, 32, BF16, causal=causal)
    for index, (special, which, position) in enumerate(cases):
        (case.query, case.key, case.value, case.grad_output)[which][index, 0, position, 5] = special
    for gradient, expected in zip(gradients_of(case), by_definition(case), strict=True):
        for index, which in enumerate(cases):
            assert torch.equal(gradient[index].isfinite(), expected[index].isfinite()), which
        clean = expected.isfinite()
        torch.testing.assert_close(gradient.double()[clean], expected[clean], atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("at_end", [False, True], ids=["start", "end"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "head_dim"), [(70, 96, 64), (4, 32, 32), (33, 225, 96), (20, 33, 64)]
)
def test_nothing_outside_the_tensors_is_read(
    seqlen_q: int, seqlen_k: int, head_dim: int, at_end: bool
) -> None:
    """Sanitizers do not see what the unit's own instructions read; a page of memory that is not there does."""
    for causal in (False, True):
        case = random_case(1, 2, 1, seqlen_q, seqlen_k, head_dim, BF16, causal=causal)
        output, lse = forward(case)
        guarded = Case(
            *(
                GuardedMemory(each, at_end).tensor
                for each in (case.query, case.key, case.value, case.grad_output)
            ),
            causal=causal,
        )
        expected = backward(case, output, lse)
        recomputed = backward(
            guarded, GuardedMemory(output, at_end).tensor, GuardedMemory(lse, at_end).tensor
        )
        for gradient, its in zip(recomputed, expected, strict=True):
            assert gradient is not None
            assert its is not None
            assert torch.equal(gradient, its)


def test_the_matrix_unit_is_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums have another order than those of dot products: bits differ somewhere."""
    case = random_case(1, 2, 2, 256, 256, 64, BF16)
    on_the_unit = gradients_of(case)
    load = library.load_function
    monkeypatch.setattr(attention_backward, "_plans", {})
    monkeypatch.setattr(attention_backward, "_thread", attention_backward._OfThread())
    monkeypatch.setattr(attention_backward, "_load", lambda *_: load(*KERNEL, *code_of_pairs()))
    by_dot_products = gradients_of(case)
    assert not any(torch.equal(*pair) for pair in zip(on_the_unit, by_dot_products, strict=True))
