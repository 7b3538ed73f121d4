from __future__ import annotations

import itertools
import math
import os
import threading
from dataclasses import replace

import pytest
import torch
from attention_gradients import (
    Case,
    assert_as_exact_as_torch,
    assert_within_bounds,
    exact_gradients,
    random_case,
    torch_gradients,
    worst_ratios,
)
from attention_reference import visible_keys
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_science.cpu import attention
from flashmoe_science.gradients import Gradients, Needs
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AVAILABLE = host.available_instruction_sets()
ALL = Needs(query=True, key=True, value=True)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
each_instruction_set = pytest.mark.parametrize(
    "instruction_set",
    [
        pytest.param(
            each, marks=pytest.mark.skipif(each not in AVAILABLE, reason=f"this CPU lacks {each.value}")
        )
        for each in InstructionSet
    ],
    ids=lambda each: each.value,
)


def forward(case: Case, instruction_set: InstructionSet | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = attention.forward(
        case.query,
        case.key,
        case.value,
        causal=case.causal,
        softmax_scale=case.softmax_scale,
        return_lse=True,
        instruction_set=instruction_set,
    )
    assert lse is not None
    return output, lse


def backward(
    case: Case,
    output: torch.Tensor,
    lse: torch.Tensor,
    needs: Needs = ALL,
    instruction_set: InstructionSet | None = None,
) -> Gradients:
    return attention.backward(
        case.grad_output,
        case.query,
        case.key,
        case.value,
        output,
        lse,
        case.grad_lse,
        causal=case.causal,
        softmax_scale=case.softmax_scale,
        needs=needs,
        instruction_set=instruction_set,
    )


def gradients_of(
    case: Case, instruction_set: InstructionSet | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = backward(case, *forward(case, instruction_set), ALL, instruction_set)
    assert query is not None
    assert key is not None
    assert value is not None
    return query, key, value


class Threads:
    """So many threads for PyTorch, and so for the kernel, while it is entered."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.count)

    def __exit__(self, *error: object) -> None:
        torch.set_num_threads(self.before)


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
    return replace(case, **strided), draw(st.sampled_from(AVAILABLE)), draw(st.integers(1, 4)), Needs(*needs)


def with_strides(tensor: torch.Tensor, order: list[int], padding: int) -> torch.Tensor:
    """The same numbers with the first three dimensions laid out in `order`, `padding` NaNs after each row."""
    wide = torch.full((*(tensor.shape[axis] for axis in order), tensor.shape[3] + padding), math.nan)
    wide = wide.to(tensor.dtype)
    wide[..., : tensor.shape[3]] = tensor.permute(*order, 3)
    back = [order.index(axis) for axis in range(3)]
    return wide[..., : tensor.shape[3]].permute(*back, 3)


@settings(max_examples=50, deadline=None)
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
    for ours, theirs, expected in zip(gradients, torch_gradients(case), exact.gradients, strict=True):
        assert ours is not None
        error, their_error = ((each.double() - expected).square().mean().sqrt() for each in (ours, theirs))
        assert error <= 1.15 * their_error


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


def by_definition(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In float64, never multiplying by what is masked: NaN and infinities get where the definition says, no further."""
    query, key, value, grad_output = (
        each.double() for each in (case.query, case.key, case.value, case.grad_output)
    )
    grad_query, grad_key, grad_value = (torch.zeros_like(each) for each in (query, key, value))
    for row in range(query.shape[2]):
        keys = int(visible_keys(query.shape[2], key.shape[2], case.causal)[row].sum())
        if keys == 0:
            continue
        q, k, v = query[:, :, row, :, None], key[:, :, :keys], value[:, :, :keys]
        weights = (k @ q * case.scale).softmax(2)
        grad = grad_output[:, :, row, None]
        grad_weights = (v * grad).sum(-1, keepdim=True)
        delta = ((weights * v).sum(2, keepdim=True) * grad).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - delta)
        grad_query[:, :, row] = (grad_scores * k).sum(2) * case.scale
        grad_key[:, :, :keys] += grad_scores * query[:, :, row, None] * case.scale
        grad_value[:, :, :keys] += weights * grad
    return grad_query, grad_key, grad_value


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
    grouped, apart = gradients_of(case), gradients_of(repeated)
    assert torch.equal(grouped[0], apart[0])
    exact = exact_gradients(case, *forward(case)).gradients
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
