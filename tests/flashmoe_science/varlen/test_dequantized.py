"""attention_varlen over a cache of FP8 where no kernel reads one: on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from varlen_cases import Shape, bounds, packed, paged, quantized
from varlen_quantized import assert_as_exact_as_ideal

from flashmoe_science import InputError, attention_varlen

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
SHAPE = Shape((1, 5, 1, 0), (70, 40, 1, 3), dtype=BF16)


def attend(call: dict[str, Any], **options: Any) -> Any:
    return attention_varlen(**call, **{**bounds(SHAPE), **options}, return_lse=True)


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("scales", ["one", "each head", "each key", "none"])
def test_scales(scales: str, page_size: int) -> None:
    call = paged(SHAPE, page_size) if page_size else packed(SHAPE)
    small, wide = quantized(call, scales)
    assert_as_exact_as_ideal(*attend(small), call, wide, **bounds(SHAPE))


def test_a_window_and_float16_in_pages_with_heads_before_tokens() -> None:
    shape = Shape((1, 5, 1, 0), (70, 40, 1, 3), dtype=FP16)
    call = paged(shape, 8, layout="HND")
    small, wide = quantized(call, "each key")
    out = torch.full((7, 4, 32), torch.nan, dtype=FP16)
    result, lse = attend(small, window=(20, 0), out=out)
    assert result is out
    assert_as_exact_as_ideal(out, lse, call, wide, **bounds(SHAPE), window=(20, 0))


def test_pages_that_are_not_there_are_refused() -> None:
    small, _ = quantized(paged(SHAPE, 16), "one")
    small["block_table"][1, 0] = 10_000
    with pytest.raises(InputError, match="block_table names page"):
        attend(small)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_scale": torch.ones(3)}, r"key_scale has shape \(3,\)"),
        ({"value_scale": torch.ones(2).double()}, "value_scale has dtype torch.float64"),
        ({"value": torch.zeros(70 + 40 + 4, 2, 32, dtype=BF16)}, "expected both caches in FP8"),
        ({"query": torch.zeros(7, 4, 32)}, "queries in bfloat16 or float16"),
        ({"key_scale": torch.ones(5, 2)}, "key_scale has shape"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, torch.Tensor], message: str) -> None:
    small, _ = quantized(packed(SHAPE), "one")
    with pytest.raises(InputError, match=message):
        attend({**small, **changes})


def test_scales_of_a_cache_that_is_not_fp8_are_refused() -> None:
    with pytest.raises(InputError, match=r"key_scale is given with a cache of torch\.bfloat16"):
        attend(packed(SHAPE), key_scale=torch.ones(()))
