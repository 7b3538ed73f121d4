"""attention_varlen over a cache of FP8 where no kernel reads one: on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from varlen_cases import Shape, bounds, packed, paged, quantized
from varlen_quantized import assert_as_exact_as_ideal

from flashmoe_science import InputError, attention_varlen
from flashmoe_science.varlen import dequantized
from flashmoe_science.varlen.arguments import Inputs, Options, check
from flashmoe_science.varlen.problem import Problem, Run, Sizes, Tensors

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


def test_only_pages_that_hold_keys_are_widened_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table may be as wide as the longest context, and sequences may share a prefix."""
    small, wide = quantized(call := paged(SHAPE, 16, spare_columns=200, garbage=0), "each key")
    for each in (small, wide, call):
        each["block_table"] = each["block_table"].clone()
        each["block_table"][1, :2] = each["block_table"][0, :2]
    sizes = []
    widened = dequantized._widened

    def counted(cache: torch.Tensor, *others: Any) -> torch.Tensor:
        rows = widened(cache, *others)
        sizes.append(rows.shape[0])
        return rows

    monkeypatch.setattr(dequantized, "_widened", counted)
    out, lse = attend(small)
    assert sizes == [8, 8]  # 5 pages, 3 of which two are shared, 1 and 1
    assert_as_exact_as_ideal(out, lse, call, wide, **bounds(SHAPE))


def test_where_lengths_are_not_read_as_many_pages_are_widened_as_the_bound_takes() -> None:
    """A table as wide as the longest context that a server allows."""
    small, _ = quantized(paged(SHAPE, 16, spare_columns=200), "each key")
    call = {name: tensor.to("meta") for name, tensor in small.items()}
    inputs = Inputs(**{name: call.get(name) for name in Inputs._fields})  # type: ignore[arg-type]
    options = Options(True, (-1, -1), 0.0, None, None, False, 0)
    given: list[Tensors] = []

    def prepare_wide(problem: Problem) -> Run:
        return lambda tensors, sizes: given.append(tensors)

    tensors = Tensors(
        *inputs[:3],
        inputs.query.new_empty(7, 4, 32),
        None,
        *(getattr(inputs, name) for name in Tensors._fields[5:]),
    )
    run = dequantized.prepare(check(inputs, options), BF16, prepare_wide)
    run(tensors, Sizes(4, 5, 70))
    (wide,) = given
    assert wide.block_table is not None
    assert wide.block_table.shape == (4, 5)
    assert wide.key.shape == (20, 16, 2, 32)
    assert (wide.key.dtype, wide.key.is_contiguous()) == (BF16, True)


def test_a_batch_without_keys() -> None:
    shape = Shape((1, 2), (0, 0), dtype=BF16)
    small, _ = quantized(paged(shape, 16), "each head")
    out, lse = attention_varlen(**small, **bounds(shape), return_lse=True)  # type: ignore[arg-type]
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
