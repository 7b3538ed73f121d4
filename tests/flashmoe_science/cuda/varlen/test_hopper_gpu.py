"""`attention_varlen` by the Hopper kernel on a GPU: the correctness matrix of serving, graphs, no synchronisation."""

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
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="the GPU is no Hopper",
    ),
]

BF16, FP16 = torch.bfloat16, torch.float16
CASES = (  # queries and keys of ragged batches
    ((130, 1, 0, 33), (200, 77, 9, 20)),
    ((1024, 129, 128, 127), (1024, 129, 128, 127)),
    ((64, 500, 2, 300), (2000, 500, 700, 301)),
    ((1,) * 40 + (600,) + (1,) * 40, (257,) * 40 + (1200,) + (130,) * 40),
)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_CUDA_VARLEN", "hopper")
    forget_calls(monkeypatch)  # those of tests of another kernel


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_ragged_and_packed(case: int, head_dim: int, causal: bool) -> None:
    shape = Shape(*CASES[case], 8, 2, head_dim, dtype=BF16)
    check(packed(shape, spare_rows=5), shape, causal=causal)
    check(packed(shape, spare_keys=7), shape, causal=causal)


@pytest.mark.parametrize("page_size", [16, 8, 1])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_ragged_and_in_pages(case: int, page_size: int) -> None:
    shape = Shape(*CASES[case], 8, 2, 128, dtype=BF16)
    check(paged(shape, page_size, spare_rows=3), shape)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(64, 64), (128, 128), (192, 128), (256, 256), (80, 80), (96, 64), (40, 72), (192, 192)],
)
def test_dimensions(head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    shape = Shape((130, 1, 0, 33), (200, 77, 9, 20), 4, 2, head_dim, value_dim, dtype)
    check(packed(shape, spare_rows=5), shape)
    check(paged(shape, 16), shape, causal=False)
    check(paged(shape, 5), shape)


@pytest.mark.parametrize("page_size", [1, 5, 8, 24, 200, 16, 32, 48, 64, 128, 256, 544])
@pytest.mark.parametrize("layout", ["NHD", "HND", "joint", "interleaved"])
def test_pages(page_size: int, layout: str) -> None:
    lengths = (0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size, 130)
    shape = Shape((1, 1, 2, 5, 1, 64, 70), lengths, 8, 2, 64, dtype=BF16)
    check(paged(shape, page_size, layout=layout, garbage=1 << 30), shape)


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
@pytest.mark.parametrize("options", ["none", "softcap", "sinks", "all"])
@pytest.mark.parametrize("page_size", [32, 3])
def test_options(page_size: int, causal: bool, window: tuple[int, int], options: str) -> None:
    shape = Shape((300, 1, 150, 7), (300, 500, 100, 400), 8, 2, 64, dtype=BF16)
    call = paged(shape, page_size, spare_rows=3)
    if options in ("sinks", "all"):
        call["sinks"] = torch.tensor([0.0, 1.0, -float("inf"), 30.0, -5.0, 2.0, 0.5, 100.0])
    softcap = 5.0 if options in ("softcap", "all") else 0.0
    check(call, shape, causal=causal, window=window, softcap=softcap)


@pytest.mark.parametrize("group", [(4, 4), (6, 2), (8, 1), (64, 8)])
def test_heads(group: tuple[int, int]) -> None:
    shape = Shape((100, 3, 1), (128, 70, 300), *group, 64, dtype=BF16)
    check(packed(shape), shape)
    check(paged(shape, 16), shape, window=(20, 0))


@pytest.mark.parametrize("causal", [True, False])
def test_the_wide_tile(causal: bool) -> None:
    shape = Shape((700, 3, 190), (8300, 140, 500), 32, 16, 64, dtype=BF16)
    check(packed(shape), shape, causal=causal)
    check(paged(shape, 1), shape, causal=causal)


def test_scores_that_outgrow_their_reference() -> None:
    shape = Shape((640,), (1400,), 2, 1, 128, dtype=BF16)
    call = packed(shape)
    call["query"] = call["query"].abs()
    call["key"] *= (1400 - torch.arange(1400))[:, None, None].to(BF16) / 40
    check(call, shape)
    check(call, shape, softcap=40.0)


def test_no_keys_at_all() -> None:
    shape = Shape((5, 100), (0, 0), 2, 1, 64, dtype=BF16)
    check(packed(shape), shape)
    check(packed(Shape((), (), 2, 1, 64, dtype=BF16), spare_rows=4), Shape((), ()))


@pytest.mark.parametrize("page_size", [64, 1])
def test_a_cache_beyond_32_bits_of_elements(page_size: int) -> None:
    call, same = cache_beyond_32_bits(40, page_size)
    given = {"max_seqlen_q": 40, "max_seqlen_k": 150}
    out, lse = attend(call, **given)
    assert_as_exact_as_pytorch(out, lse, same, **given)


@pytest.mark.parametrize("page_size", [16, 1])
def test_a_graph_is_replayed_after_lengths_and_pages_changed(page_size: int) -> None:
    largest = Shape((64, 64, 64), (512, 512, 512), 8, 2, 128, dtype=BF16)
    call = to(paged(largest, page_size), "cuda")
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
    shape = Shape((30, 20), (100, 200), 8, 2, 64, dtype=BF16)
    call = to(paged(shape, 16, spare_columns=60), "cuda")
    attend(call, max_seqlen_q=30, max_seqlen_k=200)
    from flashmoe_science.varlen.launch import _runs

    plans = len(_runs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(200):
            attend(call, max_seqlen_q=30, max_seqlen_k=200 + step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(_runs) == plans


@pytest.mark.parametrize("page_size", [16, 1])
def test_the_same_bits_every_time(page_size: int) -> None:
    shape = Shape((100, 1, 64, 700), (700, 900, 64, 700), 8, 2, 128, dtype=BF16)
    call = to(paged(shape, page_size), "cuda")
    first = attend(call, **bounds(shape))
    for _ in range(1000):
        again = attend(call, **bounds(shape))
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("page_size", [1, 8, 16, 64])
def test_sequences_share_pages(page_size: int) -> None:
    """Prompts that begin alike have the pages of that beginning in common."""
    shape = Shape((40, 90, 17), (333, 300, 290), 8, 2, 128, dtype=BF16)
    host = paged(shape, page_size)
    shared = 256 // page_size
    host["block_table"][1:, :shared] = host["block_table"][0, :shared]
    check(host, shape)


def test_with_split_keys_a_sequence_has_the_same_bits_alone_and_in_a_batch() -> None:
    shape = Shape((90, 1, 400, 20), (300, 900, 400, 9000), 8, 2, 64, dtype=BF16)
    call = to(packed(shape), "cuda")
    together, _ = attend(call, **bounds(shape), split_keys=256)
    rows, keys = call["cu_seqlens_q"].tolist(), call["cu_seqlens_k"].tolist()
    for index in range(4):
        queries, seen = slice(*rows[index : index + 2]), slice(*keys[index : index + 2])
        alone = {"query": call["query"][queries], "key": call["key"][seen], "value": call["value"][seen]}
        for name, length in (("cu_seqlens_q", queries), ("cu_seqlens_k", seen)):
            alone[name] = torch.tensor([0, length.stop - length.start], dtype=torch.int32, device="cuda")
        one, _ = attend(
            alone, max_seqlen_q=shape.queries[index], max_seqlen_k=shape.keys[index], split_keys=256
        )
        assert torch.equal(one, together[queries])
