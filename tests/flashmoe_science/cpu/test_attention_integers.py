"""Attention of 16-bit types where its products are those of 16-bit integers, block by block, and where they may not be.

Whole blocks of 64 keys, for 32 rows or more with AVX2. AVX-512, where it has products of integers and none of bf16,
takes 64 rows or more, and 128 in all. Other instruction sets compute the same in their own ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from attention_reference import assert_as_exact_as_torch, exact_attention, torch_attention
from cpu_attention import Threads, attend, inputs, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_science.cpu import attention
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from instruction_sets import each_instruction_set

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
each_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
each_type = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def problem(seqlen_q: int = 96, seqlen_k: int = 330, head_dim: int = 64) -> Tensors:
    query, key, value = inputs(1, 2, 2, seqlen_q, seqlen_k, head_dim, torch.float32)
    return query, key, value


def outlying_channels(factor: float) -> Tensors:
    """Another channel of each stands out, so that the others keep few digits of an integer."""
    query, key, value = problem()
    query[..., 3] *= factor
    key[..., 5] *= factor
    value[..., 7] *= factor
    return query, key, value


def outlying_keys(factor: float) -> Tensors:
    """Some keys and, elsewhere, some values: their blocks differ from the others."""
    query, key, value = problem()
    key[:, :, ::150] *= factor
    value[:, :, 100] *= factor
    return query, key, value


def a_tail_below_one_key(factor: float) -> Tensors:
    """One key has most of the weight, and the many others together count too."""
    query, key, value = problem()
    query = query.abs()
    key *= 0.05
    key[:, :, 200] = math.log(factor) / math.sqrt(64) / query.mean()
    return query, key, value


def values_of_one_sign(factor: float) -> Tensors:
    query, key, value = problem()
    return query * factor**0.25, key, value.abs()


def zeros_among_numbers(factor: float) -> Tensors:
    """Rows and columns of zeros, and a column of which one key has a number."""
    query, key, value = problem()
    query[:, :, 5:9] = 0
    key[:, :, 64:70] = 0
    value[..., 10:13] = 0
    value[..., 20] = 0
    value[:, :, 150, 20] = factor
    return query, key, value


def small_and_large(factor: float) -> Tensors:
    """Tiny queries with huge keys, whose squares need not be numbers."""
    query, key, value = problem()
    return query * factor**-10, key * factor**10, value * factor**8


@each_instruction_set
@each_mask
@pytest.mark.parametrize("factor", [3.0, 30.0, 1000.0])
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        *(
            (make, dtype)
            for make in (
                outlying_channels,
                outlying_keys,
                a_tail_below_one_key,
                values_of_one_sign,
                zeros_among_numbers,
            )
            for dtype in (torch.bfloat16, torch.float16)
        ),
        (small_and_large, torch.bfloat16),
    ],
)
def test_as_exact_as_pytorch(
    make: Callable[[float], Tensors],
    dtype: torch.dtype,
    factor: float,
    causal: bool,
    instruction_set: InstructionSet,
) -> None:
    query, key, value = (tensor.to(dtype) for tensor in make(factor))
    out = attend(query, key, value, causal, None, instruction_set)
    assert_as_exact_as_torch(out, query, key, value, causal)


@each_instruction_set
@settings(max_examples=30, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    seqlen_q=st.integers(8, 100),
    seqlen_k=st.integers(60, 300),
    head_dim=st.integers(1, 32).map(lambda n: 8 * n),
    causal=st.booleans(),
    scale=st.sampled_from([None, -0.2, 0.0, 1e-4, 1.0]),
    exponents=st.tuples(st.integers(-12, 12), st.integers(-12, 12), st.integers(-12, 12)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_any_shape_and_magnitude(
    instruction_set: InstructionSet,
    heads: tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    causal: bool,
    scale: float | None,
    exponents: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    made = inputs(1, *heads, seqlen_q, seqlen_k, head_dim, torch.float32)
    tensors = [(tensor * 2.0**exponent).to(dtype) for tensor, exponent in zip(made, exponents, strict=True)]
    out = attend(*tensors, causal, scale, instruction_set)
    assert_as_exact_as_torch(out, *tensors, causal, scale)


@each_instruction_set
@each_mask
@each_type
def test_what_is_not_finite_spreads_as_far_as_the_formula_says(
    dtype: torch.dtype, causal: bool, instruction_set: InstructionSet
) -> None:
    """One such number in one block; the other blocks, and in them the other rows, are as ever."""
    for number in (math.nan, math.inf, -math.inf):
        for where in range(3):
            tensors = [tensor.to(dtype) for tensor in problem(130, 200)]
            tensors[where][0, 1, 70, 9] = number
            out = attend(*tensors, causal, None, instruction_set)
            exact, _ = exact_attention(*tensors, causal)
            assert torch.equal(out.isnan(), exact.to(out.dtype).isnan())
            assert torch.equal(out.isinf(), exact.to(out.dtype).isinf())
            ordinary = exact.isfinite()
            torch.testing.assert_close(out.double()[ordinary], exact[ordinary], atol=2e-2, rtol=1e-2)


@each_instruction_set
@each_type
def test_the_log_sum_exp_is_as_exact_as_of_widened_numbers(
    dtype: torch.dtype, instruction_set: InstructionSet
) -> None:
    """Also where the weights of most blocks are far below the largest."""
    query, key, value = (tensor.to(dtype) for tensor in a_tail_below_one_key(30.0))
    lse = attention.forward(
        query,
        key,
        value,
        causal=False,
        softmax_scale=None,
        return_lse=True,
        instruction_set=instruction_set,
    )[1]
    assert lse is not None
    # With AVX512-BF16 it is that of rounded weights.
    rounded = dtype == torch.bfloat16 and instruction_set in (InstructionSet.AMX, InstructionSet.AVX512_BF16)
    torch.testing.assert_close(
        lse.double(), exact_attention(query, key, value, False)[1], atol=4e-3 if rounded else 4e-5, rtol=0
    )


@each_instruction_set
@each_type
@pytest.mark.parametrize("rows", [33, 64, 150])
def test_the_same_bits_on_any_number_of_threads(
    rows: int, dtype: torch.dtype, instruction_set: InstructionSet
) -> None:
    """Some rows' numbers are such that their block is not taken as integers."""
    query, key, value = (tensor.to(dtype) for tensor in problem(rows, 330))
    query[:, :, ::11] *= 9
    with Threads(1):
        alone = attend(query, key, value, False, None, instruction_set)
    for threads in (2, 3, 8, 16):
        with Threads(threads):
            assert torch.equal(attend(query, key, value, False, None, instruction_set), alone)


@each_instruction_set
@each_type
@pytest.mark.parametrize("rest", ["nan", "zeros", "numbers"])
def test_a_query_of_nothing_but_nan_is_no_row_of_zeros(
    rest: str, dtype: torch.dtype, instruction_set: InstructionSet
) -> None:
    """A maximum that drops NaN finds both alike."""
    query, key, value = inputs(1, 1, 1, 128, 192, 64, dtype)
    expected = attend(query, key, value, False, None, instruction_set)
    for row in (0, 17, 31, 100, 127):
        given = query.clone()
        given[0, 0, row] = {"nan": math.nan, "zeros": 0.0}.get(rest, 1.0)
        given[0, 0, row, 0] = math.nan
        out = attend(given, key, value, False, None, instruction_set)
        assert out[0, 0, row].isnan().all()
        others = torch.arange(128) != row
        assert not out[0, 0, others].isnan().any()
        torch.testing.assert_close(
            out[0, 0, others].float(), expected[0, 0, others].float(), atol=0.02, rtol=0.02
        )


def attending_sharply(share: float, head_dim: int = 64) -> Tensors:
    """Each query has one key to itself, with nearly all of its weight; 256 of both."""
    key = normal(1, 1, 256, head_dim, seed=2)
    key *= math.sqrt(head_dim) / key.norm(dim=-1, keepdim=True)
    return key * share / math.sqrt(head_dim), key, normal(1, 1, 256, head_dim, seed=3)


def short_rows_of_values(factor: float, share: float = 12.0, every: int = 2) -> Tensors:
    query, key, value = attending_sharply(share)
    value[:, :, ::every] *= factor
    return query, key, value


def rows_below_an_eighth_of_every_column() -> Tensors:
    query, key, value = attending_sharply(12.0)
    value = value.sign() * (0.6 + 0.4 * value.abs().clamp(max=1))
    value[:, :, ::7] *= 2.0**-3.5
    return query, key, value


def a_column_that_hides_the_others(own: float) -> Tensors:
    """In some rows that column is small, or it is all that they have."""
    query, key, value = attending_sharply(12.0)
    value[..., 3] *= 300
    value[:, :, ::3] *= own
    value[:, :, ::3, 3] *= 1 / own if own < 1 else 3e-5
    return query, key, value


def a_larger_column() -> Tensors:
    """It is nearly zero where the other columns are as ever: their largest decides what may be rounded."""
    query, key, value = attending_sharply(40.0)
    value[..., 3] = normal(1, 1, 256, seed=4) * 20
    value[:, :, ::2, 3] *= 2.0**-7
    return query, key, value


def sink(weight: float, factor: float) -> Tensors:
    """The first key has this weight, and hardly a value."""
    query, key, value = (normal(1, 1, 256, 64, seed=seed) for seed in (1, 2, 3))
    query[..., 0] = 4
    key *= 0.3
    key[..., 0] = 0
    key[:, :, 0] = 0
    key[:, :, 0, 0] = math.log(weight / (1 - weight) * 256) * 8 / 4
    value[:, :, 0] *= factor
    return query, key, value


def a_flat_tail(halvings: float, mean: float, first: float) -> Tensors:
    """One key of weight 1, and 63 whose equal weights are no multiples of what an integer stands for."""
    query, key = torch.zeros(1, 1, 128, 64), torch.zeros(1, 1, 64, 64)
    query[..., 0] = 1
    key[:, :, 1:, 0] = -halvings * math.log(2) * 8
    value = normal(1, 1, 64, 64, seed=3) * 0.1 + mean
    value[:, :, 0] = (normal(64, seed=4).abs() + 0.5) * first
    return query, key, value


def values_that_cancel(first: float) -> Tensors:
    query, key, _ = a_flat_tail(12.0, 0.0, 1.0)
    value = normal(1, 1, 64, 64, seed=3)
    value[:, :, 3::2] = -value[:, :, 2:-1:2]
    value[:, :, :2] *= first
    return query, key, value


def roundings_that_add_up(length: float, head_dim: int = 64) -> Tensors:
    """Elements of a query are rounded alike, beside a large one, and those of a key have one sign."""
    query = torch.full((1, 1, 256, head_dim), 64.5)
    query[..., 0] = 2.0**14
    key = normal(1, 1, 256, 1, seed=2).sign() * torch.full((head_dim,), 100.0)
    key[..., 0] = 0
    product = query[0, 0, 0].norm() * key[0, 0, 0].norm() / math.sqrt(head_dim)
    return (
        query * 2.0**-10,
        key * 2.0 ** (10 + (length / product).log2().floor()),
        normal(1, 1, 256, head_dim, seed=3),
    )


def lengths_below_a_power_of_two(element: float) -> Tensors:
    """Products of whole rows that come near the largest integer."""
    query, key = torch.full((1, 1, 128, 64), element), torch.full((1, 1, 128, 64), element)
    key *= normal(1, 1, 128, 1, seed=2).sign()
    return query, key, normal(1, 1, 128, 64, seed=3)


def subnormal_values(factor: float) -> Tensors:
    query, key, value = attending_sharply(6.0)
    return query, key, value * factor


@each_instruction_set
@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        *((short_rows_of_values, (factor,)) for factor in (0.5, 0.3, 0.25, 0.1, 2.0**-4, 2.0**-8, 0.0)),
        *((short_rows_of_values, (factor, 6.0, 5)) for factor in (0.4, 2.0**-3, 2.0**-6, 0.0, -0.0)),
        (rows_below_an_eighth_of_every_column, ()),
        (a_larger_column, ()),
        *((a_column_that_hides_the_others, (own,)) for own in (1.0, 0.02)),
        *((sink, (weight, factor)) for weight in (0.9, 0.99, 0.999) for factor in (0.0, 0.02)),
        *((a_flat_tail, case) for case in ((14.2, 1.0, 1.0), (14.2, -1.0, 1.0), (13.6, 1.0, 0.3))),
        *((a_flat_tail, (halvings, -1.0, 0.3)) for halvings in (8.52, 12.4, 15.6)),
        (a_flat_tail, (16.2, 1.0, 1.0)),
        *((values_that_cancel, (first,)) for first in (1.0, 2.0**-6)),
        *(
            (roundings_that_add_up, case)
            for case in ((4.0,), (7.9,), (30.0,), (120.0,), (24.0, 128), (7.9, 256))
        ),
        *((lengths_below_a_power_of_two, (element,)) for element in (255 / 256, 1.0, 0.5, 1.3984375)),
        *((subnormal_values, (factor,)) for factor in (1e-13, 1e-37, 1e-39)),
    ],
)
@each_type
def test_every_row_is_as_exact_as_pytorchs(
    make: Callable[..., Tensors],
    arguments: tuple[float, ...],
    dtype: torch.dtype,
    instruction_set: InstructionSet,
) -> None:
    """Beside its own length, not that of the longest: twice PyTorch's error and half a unit in the last place."""
    of_pairs = dtype == torch.bfloat16 and instruction_set in (InstructionSet.AMX, InstructionSet.AVX512_BF16)
    if of_pairs and make is subnormal_values and arguments[0] < 1e-30:
        pytest.skip("this instruction set's products of pairs take subnormal numbers for zeros")
    query, key, value = (tensor.to(dtype) for tensor in make(*arguments))
    exact, _ = exact_attention(query, key, value, False)
    error = attend(query, key, value, False, None, instruction_set).double() - exact
    theirs = torch_attention(query, key, value, False).double() - exact
    limits = torch.finfo(dtype)
    half_a_unit = limits.eps / 2 * 2.0 ** exact.abs().amax(-1).clamp(min=limits.tiny).log2().floor()
    assert (error.abs().amax(-1) <= 2 * theirs.abs().amax(-1) + half_a_unit).all()
    of_row, their_row = (each.square().mean(-1).sqrt() for each in (error, theirs))
    assert (of_row <= 2 * their_row + half_a_unit / 2).all()
    # Rows of a problem are many, and need no allowance where they are not rounded to the value itself.
    assert of_row.square().mean() <= 4 * their_row.square().mean() + (half_a_unit / 16).square().mean()


def takes_integers(instruction_set: InstructionSet) -> bool:
    if instruction_set is InstructionSet.AVX512:
        return host.integer_dot_products(instruction_set) != ()
    return instruction_set is InstructionSet.AVX2


@each_instruction_set
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [*((d, torch.bfloat16) for d in (32, 64, 128, 256)), *((d, torch.float16) for d in (32, 64, 128))],
)
def test_ordinary_numbers_are_taken_as_integers(
    head_dim: int, dtype: torch.dtype, instruction_set: InstructionSet
) -> None:
    """In fp32 they would be the rounded results of the widened numbers, bit by bit."""
    if not takes_integers(instruction_set):
        pytest.skip("this instruction set has none, or other products of 16-bit types")
    tensors = [tensor.to(dtype) for tensor in problem(head_dim=head_dim)]
    out = attend(*tensors, False, None, instruction_set)
    widened = attend(*(tensor.float() for tensor in tensors), False, None, instruction_set)
    assert not torch.equal(out, widened.to(dtype))


@each_instruction_set
@each_type
@each_mask
@pytest.mark.parametrize("row", [5, 70, 149])
def test_one_large_query_sends_the_same_blocks_to_fp32_on_any_number_of_threads(
    row: int, causal: bool, dtype: torch.dtype, instruction_set: InstructionSet
) -> None:
    """Many threads have narrow tiles, of which one alone has that query."""
    query, key, value = (tensor.to(dtype) for tensor in problem(150, 330))
    query[:, :, row] *= 40
    with Threads(1):
        alone = attend(query, key, value, causal, None, instruction_set)
    for threads in (5, 16, 32):
        with Threads(threads):
            assert torch.equal(attend(query, key, value, causal, None, instruction_set), alone)


@each_instruction_set
@each_type
def test_pooled_errors_are_below_115_percent_of_pytorchs(
    dtype: torch.dtype, instruction_set: InstructionSet
) -> None:
    """Of ordinary numbers up to where scores are left to fp32: there digits are fewest."""
    for scale in (0.25, 1.0, 1.5, 2.0, 4.0):
        ours, theirs = 0.0, 0.0
        for seed in range(8):
            tensors = [
                normal(1, 1, 192, 64, dtype=dtype, seed=3 * seed + i, scale=factor)
                for i, factor in enumerate((scale, 1.0, 1.0))
            ]
            exact, _ = exact_attention(*tensors, False)
            out = attend(*tensors, False, None, instruction_set)
            ours += float((out.double() - exact).square().mean())
            theirs += float((torch_attention(*tensors, False).double() - exact).square().mean())
        assert ours <= 1.15**2 * theirs, scale
