"""`attention_varlen` over a cache of FP8 on a GPU: decode steps, a few tokens, and prompts."""

from __future__ import annotations

import pytest
import torch
from varlen_cases import Shape, bounds, packed, paged, quantized, to
from varlen_quantized import assert_as_exact_as_ideal
from varlen_reference import exact_varlen

from flashmoe_science import attention_varlen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
BF16, FP16 = torch.bfloat16, torch.float16
KEYS = (1500, 70, 129, 1000, 71, 320)


@pytest.mark.parametrize("page_size", [0, 1, 16, 64])
@pytest.mark.parametrize("scales", ["one", "each head", "each key", "none"])
@pytest.mark.parametrize(
    ("queries", "dtype", "head_dim", "window"),
    [(1, BF16, 128, (-1, -1)), (4, BF16, 128, (-1, -1)), (1, FP16, 64, (127, 0))],
)
def test_decode_steps(
    queries: int, dtype: torch.dtype, head_dim: int, window: tuple[int, int], scales: str, page_size: int
) -> None:
    shape = Shape((queries,) * len(KEYS), KEYS, 16, 4, head_dim, dtype=dtype)
    call = paged(shape, page_size, garbage=1 << 30) if page_size else packed(shape)
    small, wide = quantized(call, scales)
    given = to(small, "cuda")
    out, lse = attention_varlen(**given, **bounds(shape), window=window, return_lse=True)  # type: ignore[arg-type]
    assert_as_exact_as_ideal(out, lse, call, wide, **bounds(shape), window=window)
    assert torch.equal(attention_varlen(**given, **bounds(shape), window=window), out)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sequences", "queries", "page_size"),
    [(9, 1, 64), (34, 1, 0), (34, 1, 1), (9, 8, 64), (34, 8, 0), (34, 8, 16), (34, 4, 64), (34, 4, 1)],
)
def test_decode_steps_of_many_sets(sequences: int, queries: int, page_size: int) -> None:
    """Sets that two blocks share, and more sets than blocks: keys come by way of shared memory."""
    keys = tuple(KEYS[i % 6] + 40 * i + (2000 if i == 3 else 0) for i in range(sequences))
    shape = Shape((queries,) * sequences, keys, 16, 4, 128, dtype=BF16)
    call = paged(shape, page_size, garbage=1 << 30) if page_size else packed(shape)
    small, wide = quantized(call, "each head")
    given = to(small, "cuda")
    for _ in range(3):
        out, lse = attention_varlen(**given, **bounds(shape), return_lse=True)  # type: ignore[arg-type]
        assert_as_exact_as_ideal(out, lse, call, wide, **bounds(shape))


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("scales", ["each head", "each key"])
def test_a_thousand_repetitions_give_the_same_bits(scales: str, queries: int) -> None:
    keys = tuple(KEYS[i % 6] + 40 * i + (7000 if i == 3 else 0) for i in range(24))
    shape = Shape((queries,) * 24, keys, 32, 8, 128, dtype=BF16)
    given = to(quantized(paged(shape, 16), scales)[0], "cuda")
    first = attention_varlen(**given, **bounds(shape))  # type: ignore[arg-type]
    for _ in range(1000):
        assert torch.equal(attention_varlen(**given, **bounds(shape)), first)  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("scales", ["each head", "each key"])
def test_prompts_go_by_way_of_a_copy_in_16_bits(scales: str, page_size: int) -> None:
    shape = Shape((70,) * len(KEYS), KEYS, 8, 2, 64, dtype=BF16)
    small, wide = quantized(paged(shape, page_size) if page_size else packed(shape), scales)
    out = attention_varlen(**to(small, "cuda"), **bounds(shape))  # type: ignore[arg-type]
    exact, _ = exact_varlen(**wide, **bounds(shape))  # type: ignore[arg-type]
    assert isinstance(out, torch.Tensor)
    error = (out.cpu().double() - exact).square().mean().sqrt()
    assert error < 0.01 * exact.square().mean().sqrt()
