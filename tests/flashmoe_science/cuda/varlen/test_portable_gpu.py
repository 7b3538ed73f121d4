"""`attention_varlen` by the general kernel on a GPU: the correctness matrix of serving, graphs, no synchronisation."""

from __future__ import annotations

import itertools

import pytest
import torch
from varlen_cases import Shape, bounds, cache_beyond_32_bits, forget_calls, packed, paged, to
from varlen_gpu import attend, check
from varlen_reference import assert_as_exact_as_pytorch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_CUDA_VARLEN", "portable")
    forget_calls(monkeypatch)  # those of tests of another kernel


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (256, 256), (80, 80), (96, 64), (40, 72)]
)
def test_dimensions(head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    shape = Shape((130, 1, 0, 33), (200, 77, 9, 20), 4, 2, head_dim, value_dim, dtype)
    check(packed(shape, spare_rows=5), shape)
    check(paged(shape, 16, layout="NHD"), shape, causal=False)


@pytest.mark.parametrize("page_size", [1, 16, 32, 48, 64, 128, 256, 544])
@pytest.mark.parametrize("layout", ["NHD", "HND", "joint", "interleaved"])
def test_pages(page_size: int, layout: str) -> None:
    lengths = (0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size, 130)
    shape = Shape((1, 1, 2, 5, 1, 64, 70), lengths, 8, 2, 64, dtype=BF16)
    garbage = 1 << 30
    check(paged(shape, page_size, layout=layout, garbage=garbage), shape)


@pytest.mark.parametrize(
    ("causal", "window"),
    [
        (True, (-1, -1)),
        (False, (-1, -1)),
        (True, (128, 0)),
        (False, (17, 5)),
        (False, (-1, 3)),
        (True, (0, 0)),
    ],
)
@pytest.mark.parametrize("options", ["none", "softcap", "sinks", "alibi", "all"])
def test_options(causal: bool, window: tuple[int, int], options: str) -> None:
    shape = Shape((300, 1, 150, 7), (300, 500, 100, 400), 8, 2, 64, dtype=BF16)
    call = paged(shape, 32, spare_rows=3)
    if options in ("sinks", "all"):
        call["sinks"] = torch.tensor([0.0, 1.0, -float("inf"), 30.0, -5.0, 2.0, 0.5, 100.0])
    if options in ("alibi", "all"):
        call["alibi_slopes"] = torch.rand(4, 8)
    softcap = 5.0 if options in ("softcap", "all") else 0.0
    check(call, shape, causal=causal, window=window, softcap=softcap)


@pytest.mark.parametrize("group", [(4, 4), (6, 2), (8, 1), (64, 8)])
def test_heads(group: tuple[int, int]) -> None:
    shape = Shape((100, 3, 1), (128, 70, 300), *group, 64, dtype=BF16)
    check(packed(shape), shape)
    check(paged(shape, 16), shape, window=(20, 0))


def test_one_long_sequence_among_many_of_one_token() -> None:
    shape = Shape((1,) * 100 + (700,) + (1,) * 155, (1,) * 100 + (3000,) + (1,) * 155, 4, 1, 64, dtype=BF16)
    check(paged(shape, 16), shape)


def test_a_cache_beyond_32_bits_of_elements() -> None:
    call, same = cache_beyond_32_bits(queries=4)
    given = {"max_seqlen_q": 4, "max_seqlen_k": 150}
    out, lse = attend(call, **given)
    assert_as_exact_as_pytorch(out, lse, same, **given)


def test_a_graph_is_replayed_after_lengths_and_pages_changed() -> None:
    largest = Shape((64, 64, 64), (512, 512, 512), 8, 2, 128, dtype=BF16)
    call = to(paged(largest, 16), "cuda")
    given = bounds(largest)
    attend(call, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(call, **given)
    for queries, keys in (
        ((64, 64, 64), (512, 512, 512)),
        ((0, 1, 5), (0, 1, 333)),
        ((9, 60, 0), (9, 17, 4)),
    ):
        call["cu_seqlens_q"].copy_(torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32))
        call["seqused_k"].copy_(torch.tensor(keys, dtype=torch.int32))
        graph.replay()
        eager, eager_lse = attend(call, **given)
        assert torch.equal(out, eager)
        assert torch.equal(lse, eager_lse)
        on_cpu = {name: tensor.cpu() for name, tensor in call.items()}
        assert_as_exact_as_pytorch(out, lse, on_cpu, **given)


def test_nothing_is_synchronised_and_no_step_makes_a_plan() -> None:
    shape = Shape((1, 1), (100, 200), 8, 2, 64, dtype=BF16)
    call = to(paged(shape, 16, spare_columns=60), "cuda")
    attend(call, max_seqlen_q=1, max_seqlen_k=200)
    from flashmoe_science.varlen.launch import _runs

    plans = len(_runs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(200):
            attend(call, max_seqlen_q=1, max_seqlen_k=200 + step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(_runs) == plans


def test_the_same_bits_every_time() -> None:
    shape = Shape((100, 1, 64), (700, 900, 64), 8, 2, 128, dtype=BF16)
    call = to(paged(shape, 16), "cuda")
    first = attend(call, **bounds(shape))
    for _ in range(1000):
        again = attend(call, **bounds(shape))
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_with_split_keys_a_sequence_has_the_same_bits_alone_and_in_a_batch() -> None:
    shape = Shape((90, 1, 40), (300, 900, 40), 8, 2, 64, dtype=BF16)
    call = to(packed(shape), "cuda")
    together, _ = attend(call, **bounds(shape), split_keys=256)
    rows, keys = call["cu_seqlens_q"].tolist(), call["cu_seqlens_k"].tolist()
    for index in range(3):
        queries, seen = slice(*rows[index : index + 2]), slice(*keys[index : index + 2])
        alone = {"query": call["query"][queries], "key": call["key"][seen], "value": call["value"][seen]}
        for name, length in (("cu_seqlens_q", queries), ("cu_seqlens_k", seen)):
            ends = [0, length.stop - length.start]
            alone[name] = torch.tensor(ends, dtype=torch.int32, device="cuda")
        one, _ = attend(alone, max_seqlen_q=shape.queries[index], max_seqlen_k=900, split_keys=256)
        assert torch.equal(one, together[queries])
