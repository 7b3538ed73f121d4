"""Attention on the matrix unit, computed by loops in place of its instructions where the processor has none."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from attention_reference import assert_as_exact_as_torch
from cpu_attention import GuardedMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix_unit import EMULATED, code_of, code_of_pairs

from flashmoe_science.cpu import attention, library

KERNEL = "attention_forward", "flashmoe_attention_method"


@pytest.fixture(scope="module")
def emulated() -> Callable[..., int]:
    return library.load_function(*KERNEL, *code_of(EMULATED))


def forward(
    launch: Callable[..., int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    threads: int = 2,
) -> torch.Tensor:
    plan = attention._plan(query, key, value, causal, softmax_scale, launch)
    out = torch.full_like(query, math.nan)
    addresses = (plan.address, *(each.data_ptr() for each in (query, key, value, out)))
    assert launch(*addresses, 0, threads) == 0
    return out


def normal(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


@given(
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3)]),
    seqlen_q=st.integers(1, 150),
    seqlen_k=st.one_of(st.integers(1, 200), st.sampled_from([32, 64, 96, 128, 160, 192])),
    head_dim=st.sampled_from([32, 64, 72, 96, 128]),
    causal=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_as_exact_as_pytorch(
    emulated: Callable[..., int],
    heads: tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    causal: bool,
    seed: int,
) -> None:
    query = normal(seed, 1, heads[0], seqlen_q, head_dim)
    key, value = (normal(seed + number, 1, heads[1], seqlen_k, head_dim) for number in (1, 2))
    out = forward(emulated, query, key, value, causal=causal)
    assert_as_exact_as_torch(out, query, key, value, causal)


def test_the_matrix_unit_is_what_computes(emulated: Callable[..., int]) -> None:
    """Whole blocks are summed in another order than by dot products: bits differ somewhere."""
    dot_products = library.load_function(*KERNEL, *code_of_pairs())
    query, key, value = (normal(seed, 2, 4, 256, 128) for seed in range(3))
    assert not torch.equal(forward(emulated, query, key, value), forward(dot_products, query, key, value))


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_masked_or_not_finite_stays_where_it_is(emulated: Callable[..., int], causal: bool) -> None:
    query, key, value = (normal(seed, 1, 1, 96, 64) for seed in range(3))
    key[0, 0, 70], value[0, 0, 70, 5] = math.nan, math.inf
    out = forward(emulated, query, key, value, causal=causal)
    if causal:
        assert out[0, 0, :70].isfinite().all()
        assert out[0, 0, 70:].isnan().all()
    else:
        assert out.isnan().all()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(64, 64), (100, 110), (257, 257), (70, 200)])
def test_masked_queries_have_the_same_bits_on_any_number_of_threads(
    emulated: Callable[..., int], seqlen_q: int, seqlen_k: int
) -> None:
    """Which of a block's keys go to the unit depends on the shape, not on which rows share a task."""
    query = normal(0, 1, 1, seqlen_q, 64)
    key, value = (normal(seed, 1, 1, seqlen_k, 64) for seed in (1, 2))
    for number in (None, math.inf):
        if number is not None:
            value[0, 0, seqlen_k // 2, 3] = number
        alone = forward(emulated, query, key, value, causal=True, threads=1)
        for threads in (2, 4, 8, 16):
            out = forward(emulated, query, key, value, causal=True, threads=threads)
            assert torch.equal(out.view(torch.int16), alone.view(torch.int16)), threads


@pytest.mark.parametrize("softmax_scale", [0.0, -0.3, 40.0])
def test_scales(emulated: Callable[..., int], softmax_scale: float) -> None:
    query, key, value = (normal(seed, 1, 2, 64, 64) for seed in range(3))
    out = forward(emulated, query, key, value, softmax_scale=softmax_scale).double()
    scores = query.double() @ key.double().mT * softmax_scale
    torch.testing.assert_close(out, scores.softmax(-1) @ value.double(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("at_end", [False, True], ids=["start", "end"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "head_dim"), [(70, 96, 64), (4, 32, 32), (33, 224, 96), (20, 33, 64)]
)
def test_nothing_outside_the_tensors_is_read(
    emulated: Callable[..., int], seqlen_q: int, seqlen_k: int, head_dim: int, at_end: bool
) -> None:
    """Sanitizers and valgrind do not see what the unit's own instructions read; a page that is not there does."""
    tensors = [normal(length, 1, 2, length, head_dim) for length in (seqlen_q, seqlen_k, seqlen_k)]
    guarded = [GuardedMemory(each, at_end).tensor for each in tensors]
    for causal in (False, True):
        assert torch.equal(
            forward(emulated, *guarded, causal=causal), forward(emulated, *tensors, causal=causal)
        )
