"""attention_varlen with chunks on the CPU, against float64."""

from __future__ import annotations

import pytest
import torch
from chunk_cases import CHUNK, LENGTHS, call_of, chunk_by_chunk, shape_of
from cpu_attention import each_dtype
from varlen_cases import bounds
from varlen_reference import assert_as_exact_as_pytorch, exact_varlen

from flashmoe_science import InputError, attention_varlen
from flashmoe_science.adapters.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

BF16_LSE_ATOL = 4e-3
"""See test_varlen.py."""


@each_dtype
@pytest.mark.parametrize("page_size", [0, 1, 16, 64])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"window": (20, 0)}, {"split_keys": 128, "softcap": 3.0}],
    ids=["causal", "full", "window", "cut"],
)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_as_exact_as_pytorch(
    lengths: str, options: dict[str, object], page_size: int, dtype: torch.dtype
) -> None:
    shape = shape_of(lengths, dtype=dtype)
    call = call_of(shape, page_size)
    given = {**options, "chunk": CHUNK}
    result = attention_varlen(**call, **bounds(shape), **given, return_lse=True)  # type: ignore[arg-type]
    atol = BF16_LSE_ATOL if dtype == torch.bfloat16 else 2e-5
    assert_as_exact_as_pytorch(*result, call, lse_atol=atol, **bounds(shape), **given)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_row_sees_its_own_chunk_alone(lengths: str) -> None:
    shape = shape_of(lengths, dtype=torch.float32)
    call = call_of(shape, 0)
    for chunk in (1, 7, CHUNK, 2**30):
        out, lse = exact_varlen(**call, chunk=chunk)
        expected = chunk_by_chunk(call, chunk)
        torch.testing.assert_close((out, lse), expected)
        ours = attention_varlen(**call, **bounds(shape), chunk=chunk)  # type: ignore[arg-type]
        torch.testing.assert_close(ours.double(), out, rtol=1e-5, atol=1e-5)


def test_with_one_chunk_for_all_it_is_attention_without_chunks() -> None:
    shape = shape_of("chunks of prompts")
    call = call_of(shape, 0)
    whole = attention_varlen(**call, **bounds(shape), chunk=0)  # type: ignore[arg-type]
    assert torch.equal(attention_varlen(**call, **bounds(shape), chunk=2**20), whole)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [-1, 2**30 + 1, True, 1.5, "8"])
def test_what_is_no_chunk_is_refused(chunk: object) -> None:
    shape = shape_of("decode")
    with pytest.raises(InputError, match="chunk is"):
        attention_varlen(**call_of(shape, 0), **bounds(shape), chunk=chunk)  # type: ignore[arg-type]


def test_a_call_with_chunks_is_not_taken_for_one_without() -> None:
    shape = shape_of("decode", dtype=torch.float32)
    call = call_of(shape, 0)
    for chunk in (CHUNK, 0, CHUNK, 16):
        out = attention_varlen(**call, **bounds(shape), chunk=chunk)  # type: ignore[arg-type]
        exact, _ = exact_varlen(**call, chunk=chunk)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_flash_attentions_functions_have_chunks() -> None:
    shape = shape_of("steps of 4", dtype=torch.float32)
    packed, paged = call_of(shape, 0), call_of(shape, 16)
    expected, _ = exact_varlen(**packed, chunk=CHUNK)
    out = flash_attn_varlen_func(
        packed["query"],
        packed["key"],
        packed["value"],
        packed["cu_seqlens_q"],
        packed["cu_seqlens_k"],
        *bounds(shape).values(),
        causal=True,
        attention_chunk=CHUNK,
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    of_cache = flash_attn_with_kvcache(
        paged["query"].view(6, 4, *paged["query"].shape[1:]),
        paged["key"],
        paged["value"],
        cache_seqlens=paged["seqused_k"],
        page_table=paged["block_table"],
        causal=True,
        attention_chunk=CHUNK,
    )
    torch.testing.assert_close(of_cache.flatten(0, 1).double(), expected[:24], rtol=1e-5, atol=1e-5)


def test_the_operator_has_chunks() -> None:
    shape = shape_of("chunks of prompts", dtype=torch.float32)
    call = call_of(shape, 0)
    compiled = torch.compile(attention_varlen, fullgraph=True, backend="eager")
    out = compiled(**call, **bounds(shape), chunk=CHUNK)
    assert torch.equal(out, attention_varlen(**call, **bounds(shape), chunk=CHUNK))  # type: ignore[arg-type]
