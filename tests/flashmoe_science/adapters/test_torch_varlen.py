"""PyTorch's `varlen_attn`, against float64 and by its own signature."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from varlen_cases import Call, Shape, packed, paged
from varlen_reference import exact_varlen

from flashmoe_science import InputError
from flashmoe_science.adapters import torch_varlen
from flashmoe_science.adapters.torch_varlen import varlen_attn, varlen_attn_out

theirs = pytest.importorskip("torch.nn.attention.varlen", reason="this PyTorch has no varlen_attn")

SHAPE = Shape((3, 1, 5), (10, 4, 5))
BOUNDS = (5, 10)


def positional(call: Call) -> tuple[Any, ...]:
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
    return (*(call.get(name) for name in names), *BOUNDS)


@pytest.mark.parametrize("name", torch_varlen.__all__)
def test_every_argument_of_pytorchs_is_taken(name: str) -> None:
    if "block_table" not in inspect.signature(theirs.varlen_attn).parameters:
        pytest.skip("an older signature")
    mine = inspect.signature(getattr(torch_varlen, name)).parameters
    options = inspect.signature(varlen_attn).parameters
    for parameter in inspect.signature(getattr(theirs, name)).parameters.values():
        same = mine.get(parameter.name) or options[parameter.name]
        assert (same.kind, same.default) == (parameter.kind, parameter.default)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 4)])
def test_packed_sequences(window: tuple[int, int]) -> None:
    call = packed(SHAPE)
    exact, exact_lse = exact_varlen(**call, causal=False, window=window, softmax_scale=0.3)
    options: dict[str, Any] = {"window_size": window, "enable_gqa": True, "scale": 0.3}
    out, lse = varlen_attn(*positional(call), **options, return_aux=theirs.AuxRequest(lse=True))
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    alone = varlen_attn(*positional(call), **options, return_aux=theirs.AuxRequest())
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(alone, out)


def test_pages_into_a_tensor() -> None:
    call = paged(SHAPE, 4)
    exact, _ = exact_varlen(**call)
    out = torch.empty_like(call["query"])
    result = varlen_attn_out(
        out,
        *positional(call),
        window_size=[-1, 0],
        enable_gqa=True,
        seqused_k=call["seqused_k"],
        block_table=call["block_table"],
    )
    assert result is out
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_with_one_split_bits_do_not_depend_on_the_batch() -> None:
    """Cut where the batch's work is balanced, a sequence of 5,000 keys has other bits beside 39 more."""
    shape = Shape((1,) * 40, (5000,) * 40, heads=1, kv_heads=1, head_dim=8)
    call = packed(shape)
    alone = {
        **call,
        "query": call["query"][:1],
        "cu_seqlens_q": call["cu_seqlens_q"][:2],
        "cu_seqlens_k": call["cu_seqlens_k"][:2],
    }

    def first(given: Call, **options: Any) -> torch.Tensor:
        names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
        result = varlen_attn(*(given[name] for name in names), 1, 5000, **options)
        assert isinstance(result, torch.Tensor)
        return result[0]

    assert torch.equal(first(call, num_splits=1), first(alone, num_splits=1))
    assert not torch.equal(first(call), first(alone))


def test_heads_are_shared_only_where_that_is_asked_for() -> None:
    with pytest.raises(InputError, match="query has 4 heads and key 2; expected as many, or enable_gqa=True"):
        varlen_attn(*positional(packed(SHAPE)))
    with pytest.raises(InputError, match="block_table is given without seqused_k"):
        varlen_attn(*positional(paged(SHAPE, 4)), enable_gqa=True, block_table=paged(SHAPE, 4)["block_table"])
    call = packed(SHAPE)
    call["query"].requires_grad_()
    with pytest.raises(InputError, match="attention_varlen has none"):
        varlen_attn(*positional(call), enable_gqa=True)
