"""Chunked local attention on a GPU, by each kernel."""

from __future__ import annotations

import pytest
import torch
from chunk_cases import FEW, LENGTHS, call_of, shape_of
from varlen_cases import Shape, bounds, forget_calls, paged, to
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science import attention_varlen
from flashmoe_science.errors import NoKernelError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LONG = Shape((900, 1, 64), (4100, 8193, 64), 8, 2, 128, dtype=torch.bfloat16)


@pytest.mark.parametrize("page_size", [0, 1, 16, 64])
@pytest.mark.parametrize("kernel", ["decode", "hopper", "portable"])
@pytest.mark.parametrize("lengths", [*LENGTHS, "long"])
def test_as_exact_as_pytorch(
    lengths: str, kernel: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "decode" and lengths not in FEW:
        pytest.skip("the decode kernel is for few queries")
    monkeypatch.setenv("FLASHMOE_CUDA_VARLEN", kernel)
    forget_calls(monkeypatch)
    shape = LONG if lengths == "long" else shape_of(lengths, head_dim=64)
    for chunk in (48, 512) if lengths != "long" else (1024,):
        call = call_of(shape, page_size, chunk)
        given = {**bounds(shape), "chunk": chunk}
        try:
            there = to(call, "cuda")
            result = attention_varlen(**there, **given, return_lse=True)  # type: ignore[arg-type]
        except NoKernelError as refusal:
            pytest.skip(str(refusal))
        assert_as_exact_as_pytorch(*result, call, **given)
        again = attention_varlen(**there, **given)  # type: ignore[arg-type]
        assert torch.equal(again, result[0])


@pytest.mark.parametrize("split_keys", [None, 256])
@pytest.mark.parametrize("page_size", [16, 64, 1])
def test_pages_that_a_window_has_left_behind_may_be_gone(
    page_size: int, split_keys: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHMOE_CUDA_VARLEN", "decode")
    forget_calls(monkeypatch)
    shape = Shape((1, 2, 1), (4100, 701, 90), 8, 2, 128, dtype=torch.bfloat16)
    call = call_of(shape, page_size, chunk=1)  # hides all but the queries' own keys
    clean = paged(shape, page_size)
    window = 100
    for sequence, (queries, keys) in enumerate(zip(shape.queries, shape.keys, strict=True)):
        first_page = max(0, keys - queries - window) // page_size
        call["block_table"][sequence, first_page:] = clean["block_table"][sequence, first_page:]
    call |= {"key": clean["key"], "value": clean["value"]}
    given = {**bounds(shape), "window": (window, 0), "split_keys": split_keys}
    result = attention_varlen(**to(call, "cuda"), **given, return_lse=True)  # type: ignore[arg-type]
    assert_as_exact_as_pytorch(*result, clean, **given)
