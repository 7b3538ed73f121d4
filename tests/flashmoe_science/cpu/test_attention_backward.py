from __future__ import annotations

import math
import os
import threading
from dataclasses import replace

import pytest
import torch
from attention_gradients import (
    Case,
    ReferenceBackend,
    assert_as_exact_as_torch,
    assert_rms_as_of_torch,
    assert_within_bounds,
    exact_gradients,
    random_case,
    worst_ratios,
)
from cpu_attention import ALL, DTYPES, Threads, backward, each_dtype, each_mask, forward, gradients_of
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_science.cpu import attention
from flashmoe_science.gradients import Needs
from flashmoe_science.jit.host import InstructionSet
from instruction_sets import any_instruction_set, each_instruction_set


@each_instruction_set
@each_dtype
@each_mask
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim"),
    [
        (1, 1, 1, 64, 64, 64),
        (1, 2, 2, 200, 200, 64),
        (2, 4, 2, 65, 127, 40),
        (1, 2, 1, 100, 37, 24),
        (1, 8, 2, 7, 70, 128),
        (1, 1, 1, 130, 131, 8),
        (1, 1, 1, 33, 257, 256),
        (2, 2, 2, 1, 129, 64),
        (1, 1, 1, 129, 1, 64),
        (1, 1, 1, 1, 1, 72),
    ],
)
def test_shapes_on_every_instruction_set(
    instruction_set: InstructionSet,
    dtype: torch.dtype,
    causal: bool,
    batch: int,
    heads: int,
    kv_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
) -> None:
    """By the bound for each element of each row; and with a gradient of the log-sum-exp."""
    for grad_lse in (False, True):
        case = random_case(
            batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, dtype, causal=causal, grad_lse=grad_lse
        )
        output, lse = forward(case, instruction_set)
        assert_within_bounds(case, output, lse, backward(case, output, lse, ALL, instruction_set))


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim(head_dim: int) -> None:
    for dtype in DTYPES:
        case = random_case(1, 2, 1, 19, 35, head_dim, dtype)
        output, lse = forward(case)
        assert_within_bounds(case, output, lse, backward(case, output, lse))


@st.composite
def strided_cases(draw: st.DrawFn) -> tuple[Case, InstructionSet, int, Needs]:
    kv_heads = draw(st.integers(1, 3))
    case = random_case(
        draw(st.integers(1, 3)),
        kv_heads * draw(st.integers(1, 3)),
        kv_heads,
        draw(st.one_of(st.just(1), st.integers(0, 150))),
        draw(st.integers(0, 150)),
        8 * draw(st.integers(1, 12)),
        draw(st.sampled_from(DTYPES)),
        causal=draw(st.booleans()),
        softmax_scale=draw(st.sampled_from([None, 0.3, -0.2, 0.0, 1])),
        grad_lse=draw(st.booleans()),
        seed=draw(st.integers(0, 2**30)),
    )
    strided = {
        name: with_strides(getattr(case, name), draw(st.permutations([0, 1, 2])), draw(st.integers(0, 5)))
        for name in ("query", "key", "value", "grad_output")
    }
    needs = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any))
    return replace(case, **strided), draw(any_instruction_set()), draw(st.integers(1, 4)), Needs(*needs)


def with_strides(tensor: torch.Tensor, order: list[int], padding: int) -> torch.Tensor:
    """The same numbers with the first three dimensions laid out in `order`, `padding` NaNs after each row."""
    wide = torch.full((*(tensor.shape[axis] for axis in order), tensor.shape[3] + padding), math.nan)
    wide = wide.to(tensor.dtype)
    wide[..., : tensor.shape[3]] = tensor.permute(*order, 3)
    back = [order.index(axis) for axis in range(3)]
    return wide[..., : tensor.shape[3]].permute(*back, 3)


@settings(max_examples=50)
@given(strided_cases())
def test_any_shape_stride_mask_scale_and_need(drawn: tuple[Case, InstructionSet, int, Needs]) -> None:
    case, instruction_set, threads, needs = drawn
    output, lse = forward(case, instruction_set)
    with Threads(threads):
        gradients = backward(case, output, lse, needs, instruction_set)
    with Threads(1):
        alone = backward(case, output, lse, ALL, instruction_set)
    assert_within_bounds(case, output, lse, gradients)
    tensors = (case.query, case.key, case.value)
    for gradient, every, needed, tensor in zip(gradients, alone, needs, tensors, strict=True):
        assert (gradient is not None) == needed
        if gradient is None:
            continue
        assert every is not None
        # Whatever else is computed, on however many threads.
        assert torch.equal(gradient, every)
        assert gradient.stride(3) == 1
        like = torch.empty_like(tensor)
        if like.stride(3) == 1:
            assert gradient.stride() == like.stride()


@each_dtype
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_long_sequences_are_within_bounds_and_as_exact_as_pytorch(dtype: torch.dtype, factor: float) -> None:
    case = random_case(1, 1, 1, 128, 2048, 64, dtype)
    case = replace(case, query=case.query * factor, key=case.key * factor)
    output, lse = forward(case)
    gradients = backward(case, output, lse)
    assert_within_bounds(case, output, lse, gradients)
    assert_as_exact_as_torch(case, gradients, exact_gradients(case, output, lse))


@each_dtype
@each_mask
@pytest.mark.parametrize(
    ("heads", "seqlen_q", "seqlen_k", "head_dim"),
    [(2, 15, 15, 128), (2, 64, 128, 64), (4, 128, 256, 64), (1, 256, 256, 256), (2, 130, 70, 40)],
)
def test_error_over_many_draws_against_pytorchs(
    dtype: torch.dtype, causal: bool, heads: int, seqlen_q: int, seqlen_k: int, head_dim: int
) -> None:
    """RMS at most 1.15 times, worst element and worst row at most twice. Pooled over a batch: of one draw of few rows
    either side's RMS varies by tens of per cent.
    """
    case = random_case(12, heads, heads, seqlen_q, seqlen_k, head_dim, dtype, causal=causal)
    output, lse = forward(case)
    gradients = backward(case, output, lse)
    exact = exact_gradients(case, output, lse)
    assert_as_exact_as_torch(case, gradients, exact)
    assert_rms_as_of_torch(case, gradients, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_of_the_gradients_of_a_sum_against_pytorchs(dtype: torch.dtype) -> None:
    """All columns of a value's gradient are one number there: nothing averages out what weights are off by. While their
    exponent was rounded twice, the RMS in fp32 was 1.6 times PyTorch's.
    """
    case = random_case(12, 1, 1, 512, 512, 64, dtype)
    case = replace(case, grad_output=torch.ones((), dtype=dtype).expand(case.query.shape))
    output, lse = forward(case)
    assert_rms_as_of_torch(case, backward(case, output, lse), exact_gradients(case, output, lse))


@each_instruction_set
@each_dtype
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal"),
    [(150, 150, True), (150, 153, True), (131, 67, True), (40, 40, True), (70, 50, False), (33, 64, False)],
)
def test_the_output_s_rounding_is_in_no_gradient_of_rows_with_few_keys(
    instruction_set: InstructionSet, dtype: torch.dtype, seqlen_q: int, seqlen_k: int, causal: bool
) -> None:
    """Gradients of such a row nearly cancel: with a delta made from a rounded output one row's error was 24 % of it."""
    for seed in range(4):
        case = random_case(
            1, 4, 2, seqlen_q, seqlen_k, 64, dtype, causal=causal, grad_lse=seed % 2 == 1, seed=seed
        )
        output, lse = forward(case, instruction_set)
        exact_output, _ = ReferenceBackend.forward(
            case.query.double(), case.key, case.value, causal=causal, softmax_scale=None, return_lse=False
        )
        # The bound without what the output's rounding may do.
        exact = exact_gradients(case, exact_output, lse)
        few = slice(0, max(0, seqlen_q - seqlen_k) + 40)
        of_query = backward(case, output, lse, Needs(True, False, False), instruction_set)[0]
        assert of_query is not None
        error = (of_query.double() - exact.gradients[0]).abs()[:, :, few]
        assert (error <= exact.bounds[0][:, :, few]).all(), (
            seed,
            float((error / exact.bounds[0][:, :, few]).max()),
        )


@each_dtype
def test_invariants(dtype: torch.dtype) -> None:
    """Values' gradients sum to those of the outputs; a vector added to every key changes no gradient of the queries."""
    case = random_case(2, 2, 2, 100, 130, 64, dtype)
    roundoff = torch.finfo(dtype).eps
    grad_query, _, grad_value = (each.double() for each in gradients_of(case))
    error = (grad_value.sum(2) - case.grad_output.double().sum(2)).abs().max()
    assert error <= 4 * roundoff * case.grad_output.double().abs().sum(2).max()
    shift = torch.randn(64, generator=torch.Generator().manual_seed(5)).to(dtype)
    shifted = gradients_of(replace(case, key=case.key + shift))[0].double()
    assert (grad_query - shifted).abs().max() <= 16 * roundoff * grad_query.abs().max() + 16 * roundoff


@each_dtype
def test_grouped_heads_are_summed_before_they_are_rounded(dtype: torch.dtype) -> None:
    case = random_case(1, 12, 2, 60, 70, 64, dtype)
    repeated = replace(case, key=case.key.repeat_interleave(6, 1), value=case.value.repeat_interleave(6, 1))
    # Of one forward pass: heads that share keys have more rows together, which may be multiplied as integers.
    output, lse = forward(case)
    grouped, apart = backward(case, output, lse), backward(repeated, output, lse)
    assert torch.equal(grouped[0], apart[0])
    exact = exact_gradients(case, output, lse).gradients
    for index in (1, 2):
        error = (grouped[index].double() - exact[index]).square().mean()
        summed = apart[index].unflatten(1, (2, 6)).sum(2)
        assert error <= 1.1 * (summed.double() - exact[index]).square().mean()


@each_dtype
@pytest.mark.parametrize("view", ["zero strides", "transposed", "odd offset"])
def test_gradients_of_the_output_of_any_layout(dtype: torch.dtype, view: str) -> None:
    case = random_case(1, 2, 1, 40, 50, 32, dtype, causal=True)
    grad_output = {
        "zero strides": torch.ones(()).to(dtype).expand(1, 2, 40, 32),  # what out.sum().backward() sends
        "transposed": case.grad_output.mT.contiguous().mT,
        "odd offset": torch.empty(1 + 2 * 40 * 32).to(dtype)[1:].view(1, 2, 40, 32).copy_(case.grad_output),
    }[view]
    gradients = gradients_of(replace(case, grad_output=grad_output))
    expected = gradients_of(replace(case, grad_output=grad_output.contiguous()))
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_the_log_sum_exp_of_any_layout(dtype: torch.dtype) -> None:
    case = random_case(2, 2, 1, 40, 50, 32, dtype, grad_lse=True)
    assert case.grad_lse is not None
    for grad_lse in (case.grad_lse.mT.contiguous().mT, torch.ones(()).expand(2, 2, 40)):
        gradients = gradients_of(replace(case, grad_lse=grad_lse))
        expected = gradients_of(replace(case, grad_lse=grad_lse.contiguous()))
        assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1, 400, 400, 64), (1, 6, 3, 150, 200, 32), (5, 2, 1, 70, 150, 64)])
def test_the_same_bits_on_any_number_of_threads(
    instruction_set: InstructionSet, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """One head for all threads, some heads for each, and what lies between."""
    case = random_case(*shape, dtype, causal=True, grad_lse=True)  # type: ignore[arg-type]
    output, lse = forward(case, instruction_set)
    with Threads(1):
        expected = backward(case, output, lse, ALL, instruction_set)
    for threads in (2, 3, 8):
        with Threads(threads):
            for _ in range(2):
                gradients = backward(case, output, lse, ALL, instruction_set)
                for gradient, alone in zip(gradients, expected, strict=True):
                    assert gradient is not None
                    assert alone is not None
                    assert torch.equal(gradient, alone), threads


def test_a_head_s_bits_do_not_depend_on_what_else_is_in_the_batch() -> None:
    case = random_case(3, 4, 2, 150, 170, 64, torch.bfloat16, causal=True)
    whole = gradients_of(case)
    part = gradients_of(
        Case(case.query[1:2], case.key[1:2], case.value[1:2], case.grad_output[1:2], causal=True)
    )
    assert all(torch.equal(one[1:2], other) for one, other in zip(whole, part, strict=True))


def test_calls_from_several_threads_at_once() -> None:
    cases = [random_case(1, 2, 1, 100 + 13 * i, 90 + i, 64, torch.float32, seed=i) for i in range(4)]
    expected = [gradients_of(case) for case in cases]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            gradients = gradients_of(cases[index])
            if not all(torch.equal(*pair) for pair in zip(gradients, expected[index], strict=True)):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_sums_are_not_read_before_they_are_written() -> None:
    """Memory that was given back holds NaN: what a call gets of it must not show."""
    case = random_case(1, 2, 1, 200, 500, 64, torch.bfloat16, causal=True)
    expected = gradients_of(case)
    for _ in range(5):
        [torch.full((size,), math.nan) for size in (2**14, 2**15, 2**16, 2**17)]
        gradients = gradients_of(case)
        assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


def test_the_bound_finds_a_wrong_row() -> None:
    """A small row that is off by a tenth, where the largest row's rounding error is larger than that."""
    case = random_case(1, 1, 1, 40, 40, 32, torch.bfloat16, causal=True)
    grad_output = case.grad_output.clone()
    grad_output[:, :, 7] *= 2.0**-12
    case = replace(case, grad_output=grad_output)
    output, lse = forward(case)
    gradients = gradients_of(case)
    exact = exact_gradients(case, output, lse)
    assert max(worst_ratios(gradients, exact).values()) <= 1
    gradients[0][:, :, 7] *= 1.1
    difference = (gradients[0].double() - exact.gradients[0]).abs()
    assert difference[:, :, 7].max() < difference.max()
    assert worst_ratios(gradients, exact)["query"] > 1


@pytest.mark.skipif(os.cpu_count() == 1, reason="one processor")
def test_more_threads_than_processors_end() -> None:
    """Threads of one head wait for each other in turn; with more of them than processors most do not run."""
    case = random_case(1, 1, 1, 512, 512, 64, torch.float32, causal=True)
    output, lse = forward(case)
    with Threads(4 * (os.cpu_count() or 1)):
        gradients = backward(case, output, lse)
    assert_within_bounds(case, output, lse, gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [(20, 40), (70, 300)], ids=str)
def test_keys_in_two_calls_with_the_output_of_all(lengths: tuple[int, int], dtype: torch.dtype) -> None:
    """As where keys lie on several machines: weights of a call's keys add up to less than one."""
    torch.manual_seed(3)
    query, gradient = (torch.randn(2, 4, lengths[0], 32).to(dtype) for _ in range(2))
    key, value = (torch.randn(2, 2, lengths[1], 32).to(dtype) for _ in range(2))
    output, lse = attention.forward(query, key, value, causal=False, softmax_scale=None, return_lse=True)
    assert lse is not None

    def of(keys: slice) -> list[torch.Tensor]:
        gradients = attention.backward(
            *(gradient, query, key[:, :, keys], value[:, :, keys], output, lse, None),
            causal=False,
            softmax_scale=None,
            needs=Needs(True, True, True),
        )
        return [each.float() for each in gradients if each is not None]

    middle = lengths[1] // 3
    whole, first, second = of(slice(None)), of(slice(middle)), of(slice(middle, None))
    together = first[0] + second[0], torch.cat([first[1], second[1]], 2), torch.cat([first[2], second[2]], 2)
    for mine, right in zip(together, whole, strict=True):
        assert (mine - right).norm() <= (1e-5 if dtype == torch.float32 else 0.01) * right.norm()
