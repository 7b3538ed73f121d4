from __future__ import annotations

import itertools
import math
import mmap
import threading
from collections.abc import Callable

import pytest
import torch
from attention_reference import assert_as_exact_as_torch, exact_attention, torch_attention, visible_keys
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_science.cpu import attention
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AVAILABLE = host.available_instruction_sets()

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
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


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    instruction_set: InstructionSet | None = None,
) -> torch.Tensor:
    return attention.forward(
        query,
        key,
        value,
        causal=causal,
        softmax_scale=scale,
        return_lse=False,
        instruction_set=instruction_set,
    )[0]


def normal(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def inputs(
    batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        normal(batch, heads, seqlen_q, head_dim, dtype=dtype, seed=1),
        normal(batch, kv_heads, seqlen_k, head_dim, dtype=dtype, seed=2),
        normal(batch, kv_heads, seqlen_k, head_dim, dtype=dtype, seed=3),
    )


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
        "instruction_set": draw(st.sampled_from(AVAILABLE)),
        "threads": draw(st.integers(1, 4)),
    }


def with_strides(tensor: torch.Tensor, order: list[int], padding: int) -> torch.Tensor:
    """The same numbers with the first three dimensions laid out in `order`, `padding` NaNs after each row."""
    wide = torch.full((*(tensor.shape[axis] for axis in order), tensor.shape[3] + padding), math.nan)
    wide = wide.to(tensor.dtype)
    wide[..., : tensor.shape[3]] = tensor.permute(*order, 3)
    back = [order.index(axis) for axis in range(3)]
    return wide[..., : tensor.shape[3]].permute(*back, 3)


@settings(max_examples=80, deadline=None)
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


class GuardedMemory:
    """A tensor that ends (or starts) right at a page that cannot be touched."""

    def __init__(self, tensor: torch.Tensor, at_end: bool) -> None:
        import ctypes

        page = mmap.PAGESIZE
        size = tensor.numel() * tensor.element_size()
        pages = -(-size // page)
        self._map = mmap.mmap(-1, (pages + 2) * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        for guard in (base, base + (pages + 1) * page):
            assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
        offset = page + (pages * page - size if at_end else 0)
        flat = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        self.tensor = flat.view(tensor.shape).copy_(tensor)


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("at_end", [False, True], ids=["start", "end"])
def test_nothing_outside_the_tensors_is_read(
    dtype: torch.dtype, at_end: bool, instruction_set: InstructionSet
) -> None:
    for shape in [(1, 1, 1, 17, 33, 8), (1, 2, 1, 3, 65, 24), (1, 2, 2, 65, 1, 72), (1, 1, 1, 1, 67, 64)]:
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
