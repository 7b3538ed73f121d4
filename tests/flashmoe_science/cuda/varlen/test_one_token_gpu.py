"""With `split_keys` a sequence of one token has the same bits alone, in a decode step, and beside longer sequences."""

from __future__ import annotations

import pytest
import torch
from varlen_cases import Call, Shape, bounds, forget_calls, packed, paged, picked, quantized, to
from varlen_gpu import attend
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science.cuda.varlen.select import OVERRIDE_VARIABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BF16 = torch.bfloat16
SPLIT = {"split_keys": 512}
ONES = (0, 2, 3, 5, 7)
"""Of the batch, sequences of one token; beside them drafts, a prompt, and one without tokens."""
DRAFTS, PROMPT, NOTHING = 1, 4, 6
KEYS = (3000, 700, 129, 9000, 900, 17, 40, 513)


def shape_of(head_dim: int, heads: int = 32, kv_heads: int = 8) -> Shape:
    return Shape((1, 4, 1, 1, 300, 1, 0, 1), KEYS, heads, kv_heads, head_dim, dtype=BF16)


def made(shape: Shape, page_size: int) -> Call:
    return (
        paged(shape, page_size, garbage=1 << 30, spare_rows=2) if page_size else packed(shape, spare_rows=2)
    )


def asked_for(call: Call, shape: Shape, *indices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some of the sequences, with bounds of their own."""
    own = Shape(tuple(shape.queries[i] for i in indices), tuple(shape.keys[i] for i in indices))
    return attend(picked(call, shape, *indices), **bounds(own), **SPLIT)


def assert_same_bits(call: Call, shape: Shape) -> None:
    rows = {index: sum(shape.queries[:index]) for index in range(len(KEYS))}
    whole = attend(call, **bounds(shape), **SPLIT)
    step = asked_for(call, shape, *ONES)
    for row, index in enumerate(ONES):
        alone = asked_for(call, shape, index)
        beside_drafts = asked_for(call, shape, DRAFTS, index)
        beside_prompt = asked_for(call, shape, index, PROMPT)
        for expected, of_step, of_drafts, of_prompt, of_whole in zip(
            alone, step, beside_drafts, beside_prompt, whole, strict=True
        ):
            assert not expected.isnan().any()
            assert torch.equal(of_step[row], expected[0])
            assert torch.equal(of_drafts[4], expected[0])
            assert torch.equal(of_prompt[0], expected[0])
            assert torch.equal(of_whole[rows[index]], expected[0])
    total = sum(shape.queries)
    assert not whole[0][total:].any()
    assert (whole[1][total:] == -torch.inf).all()


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDE_VARIABLE, raising=False)
    forget_calls(monkeypatch)  # those of tests of one kernel


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_in_any_batch(head_dim: int, page_size: int) -> None:
    shape = shape_of(head_dim)
    host = made(shape, page_size)
    assert_same_bits(to(host, "cuda"), shape)
    out, lse = attend(to(host, "cuda"), **bounds(shape), **SPLIT)
    assert_as_exact_as_pytorch(out, lse, host, **bounds(shape), **SPLIT)


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize(("head_dim", "scales"), [(64, "each head"), (128, "each head"), (128, "each key")])
def test_over_a_cache_of_fp8(head_dim: int, scales: str, page_size: int) -> None:
    """Prompts go by way of a copy in 16 bits, and one token does not."""
    shape = shape_of(head_dim)
    assert_same_bits(to(quantized(made(shape, page_size), scales)[0], "cuda"), shape)


def test_heads_that_are_too_many_for_a_kernel_of_few_queries() -> None:
    shape = shape_of(128, 71, 1)
    assert_same_bits(to(made(shape, 16), "cuda"), shape)


@pytest.mark.parametrize("kernel", ["decode", "portable"])
def test_by_a_kernel_that_is_asked_for(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE_VARIABLE, kernel)
    shape = shape_of(128)
    call = to(made(shape, 16), "cuda")
    for index in ONES:
        alone, beside = asked_for(call, shape, index), asked_for(call, shape, DRAFTS, index)
        assert torch.equal(beside[0][4], alone[0][0])
        assert torch.equal(beside[1][4], alone[1][0])


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_graph_is_replayed_after_lengths_changed(head_dim: int, fp8: bool) -> None:
    """Which sequences have one token changes too, as rows of `cu_seqlens_q` are the device's."""
    shape = shape_of(head_dim)
    host = made(shape, 16)
    call, given = to(quantized(host, "each head")[0] if fp8 else host, "cuda"), {**bounds(shape), **SPLIT}
    attend(call, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(call, **given)
    for queries in (
        shape.queries,
        (1,) * 8,
        (300, 1, 1, 1, 1, 1, 1, 1),
        (0, 2, 1, 300, 1, 0, 1, 1),
        (0,) * 8,
    ):
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        call["cu_seqlens_q"].copy_(starts)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        eager, eager_lse = attend(call, **given)
        assert torch.equal(out, eager)
        assert torch.equal(lse, eager_lse)
        now = Shape(queries, KEYS, 32, 8, head_dim, dtype=BF16)
        for index in (i for i in range(8) if queries[i] == 1):
            alone, alone_lse = asked_for(call, now, index)
            assert torch.equal(out[starts[index]], alone[0])
            assert torch.equal(lse[starts[index]], alone_lse[0])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_longer_sequences_have_the_same_bits_for_all_bounds_from_16_on(head_dim: int) -> None:
    shape = Shape((3, 1, 14), (3000, 40, 700), 32, 8, head_dim, dtype=BF16)
    call = to(made(shape, 16), "cuda")
    results = [attend(call, max_seqlen_q=most, max_seqlen_k=3000, **SPLIT) for most in (16, 300, 5000)]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
