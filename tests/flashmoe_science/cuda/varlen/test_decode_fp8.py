"""The decode kernel over a cache of FP8 without a GPU: its own source, compiled as C++, against an ideal kernel."""

from __future__ import annotations

import pytest
import torch
from compiled_for import each_architecture
from emulated import NEEDS_COMPILER
from emulated_decode import options, run_on_cpu
from varlen_cases import Shape, bounds, packed, paged, quantized
from varlen_quantized import assert_as_exact_as_ideal

from flashmoe_science.configs.attention import decode as configs
from flashmoe_science.configs.attention.decode import Cache, Pages
from flashmoe_science.cuda.varlen import decode
from flashmoe_science.jit.nvrtc import compile_kernel

BF16, FP16 = torch.bfloat16, torch.float16
SHAPE = Shape((1, 2, 1, 0, 1), (300, 7, 129, 16, 0), heads=4, kv_heads=2, head_dim=64, dtype=BF16)


@NEEDS_COMPILER
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("scales", ["one", "each head", "each key", "none"])
def test_scales(scales: str, page_size: int) -> None:
    call = paged(SHAPE, page_size) if page_size else packed(SHAPE)
    small, wide = quantized(call, scales)
    out, lse = run_on_cpu(small, options(), tuple(bounds(SHAPE).values()), 3)
    assert_as_exact_as_ideal(out, lse, call, wide, **bounds(SHAPE))


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "heads", "queries", "dtype"),
    [(128, 128, 8, 1, BF16), (128, 128, 8, 4, FP16), (192, 128, 4, 1, BF16), (40, 72, 6, 3, BF16)],
)
def test_dims_and_rows(head_dim: int, value_dim: int, heads: int, queries: int, dtype: torch.dtype) -> None:
    shape = Shape((queries, queries, 1), (200, 7, 33), heads, 2, head_dim, value_dim, dtype)
    call = paged(shape, 16, layout="HND")
    small, wide = quantized(call, "each key")
    out, lse = run_on_cpu(small, options(window=(60, 0)), tuple(bounds(shape).values()), 4)
    assert_as_exact_as_ideal(out, lse, call, wide, **bounds(shape), window=(60, 0))


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_code_is_widened_exactly(dtype: torch.dtype) -> None:
    """One key a sequence, so that the result is its value: all 256 codes."""
    codes = torch.arange(256, dtype=torch.uint8)
    value = codes.view(32, 1, 8).view(torch.float8_e4m3fn)
    call = {
        "query": torch.randn(32, 1, 8).to(dtype),
        "key": torch.zeros(32, 1, 8).to(value.dtype),
        "value": value,
        "cu_seqlens_q": torch.arange(33, dtype=torch.int32),
        "cu_seqlens_k": torch.arange(33, dtype=torch.int32),
    }
    out, _ = run_on_cpu(call, options(), (1, 1), 2)
    torch.testing.assert_close(out, value.to(dtype), rtol=0, atol=0, equal_nan=True)


@each_architecture(["sm_80", "sm_90"])
@pytest.mark.usefixtures("nvrtc")
def test_kernels_of_fp8_compile_without_spills(architecture: str) -> None:
    for dim, rows, pages, cache in (
        (64, 8, Pages.TILES, Cache.SCALED_HEADS),
        (128, 8, Pages.TILES, Cache.SCALED_HEADS),
        (128, 8, Pages.ROWS, Cache.SCALED_KEYS),
        (128, 16, Pages.TILES, Cache.SCALED_KEYS),
    ):
        chosen = configs.configuration(architecture, dim, dim, rows, pages, False, cache)
        compile_kernel(decode.kernel(chosen, BF16, architecture))
