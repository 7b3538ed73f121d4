from __future__ import annotations

import math
import threading

import pytest
import torch
from attention_reference import assert_as_exact_as_torch, exact_attention, torch_attention, visible_keys
from cpu_attention import DTYPES, GuardedMemory, Threads, attend, each_dtype, inputs, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_science.cpu import attention
from flashmoe_science.jit.host import InstructionSet
from instruction_sets import any_instruction_set, each_instruction_set


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim"),
    [
        (1, 1, 1, 64, 64, 64),
        (1, 2, 2, 200, 200, 64),
        (2, 4, 2, 65, 127, 40),
        (1, 2, 1, 100, 37, 24),
        (1, 4, 1, 1, 333, 64),
        (2, 3, 3, 1, 333, 64),
        (1, 2, 2, 1, 64, 40),
        (1, 1, 1, 1, 129, 256),
        (3, 2, 2, 1, 5, 8),
        (1, 2, 2, 1, 70, 168),
        (1, 8, 2, 7, 70, 128),
        (1, 1, 1, 130, 131, 8),
        (1, 1, 1, 33, 257, 256),
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
    query, key, value = inputs(batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, dtype)
    out, lse = attention.forward(
        query,
        key,
        value,
        causal=causal,
        softmax_scale=None,
        return_lse=True,
        instruction_set=instruction_set,
    )
    assert_as_exact_as_torch(out, query, key, value, causal)
    exact_lse = exact_attention(query, key, value, causal)[1]
    assert lse is not None
    assert lse.dtype == torch.float32
    # bf16 sums rounded weights, each to within 2^-9.
    tolerance = 4e-3 if dtype == torch.bfloat16 else 4e-6
    torch.testing.assert_close(lse.double(), exact_lse, atol=tolerance, rtol=1e-6)


@each_instruction_set
@pytest.mark.parametrize(("heads", "rows"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 3)])
def test_few_rows_of_several_heads_are_as_exact_as_pytorchs(
    heads: int, rows: int, instruction_set: InstructionSet
) -> None:
    """Over hundreds of problems, since the error of one row's few numbers is chance. Heads share their keys."""
    shape = (600, heads, 1, rows, 40, 80)
    query, key, value = inputs(*shape, torch.float32)
    exact, _ = exact_attention(query, key, value, False, 0.3)
    ours = attend(query, key, value, False, 0.3, instruction_set)
    theirs = torch_attention(query, key, value, False, 0.3)
    error, their_error = ((each.double() - exact).square().mean().sqrt() for each in (ours, theirs))
    assert error <= 1.25 * their_error


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_more_queries_than_a_task_has_room_for(
    causal: bool, dtype: torch.dtype, instruction_set: InstructionSet
) -> None:
    """How many that is goes by the second-level cache and the threads, the bits do not."""
    query, key, value = inputs(1, 2, 1, 1100, 1100 if causal else 70, 16, dtype)
    with Threads(1):
        alone = attend(query, key, value, causal, None, instruction_set)
    assert_as_exact_as_torch(alone, query, key, value, causal)
    for threads in (3, 7):
        with Threads(threads):
            assert torch.equal(attend(query, key, value, causal, None, instruction_set), alone)


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("lengths", [(64, 64), (257, 257), (33, 128), (100, 110), (70, 40)])
def test_masked_queries_have_the_same_bits_on_any_number_of_threads(
    lengths: tuple[int, int], dtype: torch.dtype, instruction_set: InstructionSet
) -> None:
    """Tiles of few queries for many threads divide sums along the mask as whole tiles do."""
    query, key, value = inputs(1, 1, 1, *lengths, 72, dtype)
    with Threads(1):
        alone = attend(query, key, value, True, None, instruction_set)
    assert_as_exact_as_torch(alone, query, key, value, True)
    for threads in (2, 4, 8, 16):
        with Threads(threads):
            assert torch.equal(attend(query, key, value, True, None, instruction_set), alone), threads


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim(head_dim: int) -> None:
    for dtype in DTYPES:
        query, key, value = inputs(1, 2, 1, 19, 35, head_dim, dtype)
        assert_as_exact_as_torch(attend(query, key, value), query, key, value, False)


@st.composite
def strided_cases(draw: st.DrawFn) -> dict[str, object]:
    kv_heads = draw(st.integers(1, 3))
    return {
        "batch": draw(st.integers(1, 3)),
        "heads": kv_heads * draw(st.integers(1, 4)),
        "kv_heads": kv_heads,
        "seqlen_q": draw(st.one_of(st.just(1), st.integers(0, 150))),
        "seqlen_k": draw(st.integers(0, 150)),
        "head_dim": 8 * draw(st.integers(1, 12)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "causal": draw(st.booleans()),
        "order": [draw(st.permutations([0, 1, 2])) for _ in range(3)],
        "padding": [draw(st.integers(0, 5)) for _ in range(3)],
        "scale": draw(st.sampled_from([None, 0.3, -0.2, 0.0, 1])),
        "instruction_set": draw(any_instruction_set()),
        "threads": draw(st.integers(1, 4)),
    }


def with_strides(tensor: torch.Tensor, order: list[int], padding: int) -> torch.Tensor:
    """The same numbers with the first three dimensions laid out in `order`, `padding` NaNs after each row."""
    wide = torch.full((*(tensor.shape[axis] for axis in order), tensor.shape[3] + padding), math.nan)
    wide = wide.to(tensor.dtype)
    wide[..., : tensor.shape[3]] = tensor.permute(*order, 3)
    back = [order.index(axis) for axis in range(3)]
    return wide[..., : tensor.shape[3]].permute(*back, 3)


@settings(max_examples=80)
@given(strided_cases())
def test_any_shape_stride_mask_and_scale(case: dict) -> None:  # type: ignore[type-arg]
    tensors = inputs(
        case["batch"],
        case["heads"],
        case["kv_heads"],
        case["seqlen_q"],
        case["seqlen_k"],
        case["head_dim"],
        case["dtype"],
    )
    query, key, value = (
        with_strides(tensor, order, padding)
        for tensor, order, padding in zip(tensors, case["order"], case["padding"], strict=True)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(case["threads"])
    try:
        out = attend(query, key, value, case["causal"], case["scale"], case["instruction_set"])
    finally:
        torch.set_num_threads(before)
    assert out.stride() == torch.empty_like(query).stride()
    assert_as_exact_as_torch(out, *tensors, case["causal"], case["scale"])


@each_dtype
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_long_sequences_are_as_exact_as_pytorch(dtype: torch.dtype, factor: float) -> None:
    query = normal(1, 1, 128, 64, dtype=dtype, seed=1, scale=factor)
    key = normal(1, 1, 4096, 64, dtype=dtype, seed=2, scale=factor)
    value = normal(1, 1, 4096, 64, dtype=dtype, seed=3)
    assert_as_exact_as_torch(attend(query, key, value), query, key, value, False)


@each_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_empty_sequences(dtype: torch.dtype, causal: bool) -> None:
    for batch, heads, seqlen_q, seqlen_k in [
        (0, 2, 3, 4),
        (2, 0, 3, 4),
        (1, 2, 0, 5),
        (1, 2, 5, 0),
        (1, 2, 0, 0),
    ]:
        query, key, value = inputs(batch, heads, heads, seqlen_q, seqlen_k, 64, dtype)
        out, lse = attention.forward(query, key, value, causal=causal, softmax_scale=None, return_lse=True)
        assert out.shape == query.shape
        assert lse is not None
        assert lse.shape == query.shape[:3]
        assert (out == 0).all()
        assert (lse == -math.inf).all()


def test_rows_without_keys_are_zero_whatever_the_values_hold() -> None:
    query, key, value = inputs(1, 1, 1, 100, 40, 32, torch.float32)
    value[:] = math.nan
    out, lse = attention.forward(query, key, value, causal=True, softmax_scale=None, return_lse=True)
    assert lse is not None
    without = ~visible_keys(100, 40, True).any(-1)
    assert (out[0, 0, without] == 0).all()
    assert (lse[0, 0, without] == -math.inf).all()
    assert out[0, 0, ~without].isnan().all()
    assert lse[0, 0, ~without].isfinite().all()


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("at_end", [False, True], ids=["start", "end"])
def test_nothing_outside_the_tensors_is_read(
    dtype: torch.dtype, at_end: bool, instruction_set: InstructionSet
) -> None:
    shapes = [
        *[(1, 1, 1, 17, 33, 8), (1, 2, 1, 3, 65, 24), (1, 2, 2, 65, 1, 72), (1, 1, 1, 1, 67, 64)],
        (1, 2, 1, 70, 96, 64),  # a matrix unit's, where there is one
    ]
    for shape in shapes:
        tensors = inputs(*shape, dtype)
        guarded = [GuardedMemory(tensor, at_end) for tensor in tensors]
        for causal in (False, True):
            out = attend(*(each.tensor for each in guarded), causal, None, instruction_set)
            assert torch.equal(out, attend(*tensors, causal, None, instruction_set))


def test_repeated_calls_give_the_same_bits() -> None:
    query, key, value = inputs(2, 4, 2, 150, 150, 64, torch.bfloat16)
    first = attend(query, key, value, causal=True)
    assert all(torch.equal(first, attend(query, key, value, causal=True)) for _ in range(10))


def test_calls_from_several_threads_at_once() -> None:
    cases = [inputs(1, 4, 2, 100 + 13 * i, 90 + i, 64, torch.float32) for i in range(4)]
    expected = [attend(*case) for case in cases]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(50):
            if not torch.equal(attend(*cases[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_expanded_queries_get_an_output_of_their_own() -> None:
    query, key, value = inputs(2, 3, 3, 20, 20, 16, torch.float32)
    expanded = query[:1, :1].expand(2, 3, 20, 16)
    out = attend(expanded, key, value)
    assert_as_exact_as_torch(out, expanded.contiguous(), key, value, False)


def test_pytorch_is_the_reference_that_the_bounds_assume() -> None:
    """The bounds in this file are relative to PyTorch's error: make sure that there is one, a small one."""
    query, key, value = inputs(1, 2, 2, 90, 90, 64, torch.float32)
    error = (
        (torch_attention(query, key, value, True) - exact_attention(query, key, value, True)[0]).abs().max()
    )
    assert 0 < error < 1e-5


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_the_lse_does_not_follow_the_default_dtype(default: torch.dtype) -> None:
    """A buffer of another type was written past its end, or held other numbers."""
    query, key, value = (torch.randn(1, 2, 64, 32, dtype=torch.float32) for _ in range(3))
    expected = attention.forward(query, key, value, causal=False, softmax_scale=None, return_lse=True)[1]
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        lse = attention.forward(query, key, value, causal=False, softmax_scale=None, return_lse=True)[1]
    finally:
        torch.set_default_dtype(before)
    assert lse is not None
    assert expected is not None
    assert lse.dtype == torch.float32
    assert torch.equal(lse, expected)


def test_results_do_not_follow_the_default_device() -> None:
    query, key, value = (torch.randn(1, 2, 64, 32) for _ in range(3))
    with torch.device("meta"):
        output, lse = attention.forward(query, key, value, causal=False, softmax_scale=None, return_lse=True)
    assert lse is not None
    assert output.is_cpu
    assert lse.is_cpu
