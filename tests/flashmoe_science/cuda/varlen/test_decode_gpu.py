"""`attention_varlen` by the decode kernel on a GPU: the correctness matrix of serving, graphs, equal bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from varlen_cases import Shape, bounds, forget_calls, packed, paged, to
from varlen_gpu import attend, check, lengths
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science import attention_varlen
from flashmoe_science.configs.attention.decode import MOST_ARRIVALS
from flashmoe_science.cuda.tickets import TicketPool
from flashmoe_science.cuda.varlen import decode as decode_kernel
from flashmoe_science.errors import NoKernelError
from flashmoe_science.varlen import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_CUDA_VARLEN", "decode")
    forget_calls(monkeypatch)  # those of tests of another kernel


@pytest.mark.parametrize("page_size", [0, 1, 16, 48, 64, 544])
@pytest.mark.parametrize("split_keys", [None, 256])
def test_pages(page_size: int, split_keys: int | None) -> None:
    for keys in ((3000, 1, 0, 129, 16, 700), (3000, 40000, 17), lengths(200, 600)):
        shape = Shape((1,) * len(keys), keys, 32, 8, 128, dtype=BF16)
        call = (
            paged(shape, page_size, garbage=1 << 30, spare_rows=2)
            if page_size
            else packed(shape, spare_keys=3)
        )
        check(call, shape, split_keys=split_keys)


@pytest.mark.parametrize("layout", ["HND", "joint", "interleaved"])
def test_strides(layout: str) -> None:
    shape = Shape((1,) * 30, lengths(30, 900), 8, 2, 128, dtype=BF16)
    check(paged(shape, 16, layout=layout), shape)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (256, 256), (80, 80), (96, 64), (40, 72)]
)
def test_dimensions(head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    shape = Shape((1, 2, 1, 0, 1), (100, 2000, 31, 8, 3), 8, 2, head_dim, value_dim, dtype)
    check(paged(shape, 16), shape)


@pytest.mark.parametrize("queries", [2, 3, 4, 8])
@pytest.mark.parametrize("window", [(-1, -1), (100, 0)])
def test_several_tokens(queries: int, window: tuple[int, int]) -> None:
    def shape_of(kv_heads: int) -> Shape:
        keys = (*lengths(20, 900), 5, 5, 3)
        return Shape((queries,) * 20 + (1, 0, queries), keys, 16, kv_heads, 128, dtype=BF16)

    check(paged(shape_of(4), 16), shape_of(4), window=window)
    # Of keys that are looked up one by one, registers hold fewer: 16 rows of heads.
    check(paged(shape_of(8), 1), shape_of(8), window=window, split_keys=128)


def test_rows_that_are_too_many_for_this_kernel_go_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((8,) * 20 + (1, 0, 8), (*lengths(20, 900), 5, 5, 3), 16, 4, 128, dtype=BF16)
    call = paged(shape, 1)
    with pytest.raises(NoKernelError, match="up to 16 rows of heads"):
        attend(to(call, "cuda"), **bounds(shape))
    monkeypatch.delenv("FLASHMOE_CUDA_VARLEN")
    check(call, shape, window=(100, 0), split_keys=128)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_options(softcap: float, page_size: int) -> None:
    shape = Shape((1,) * 40, lengths(40, 3000), 64, 8, 64, dtype=BF16)
    call = paged(shape, page_size, garbage=1 << 30)
    call["sinks"] = 3 * torch.randn(64)
    check(call, shape, window=(127, 0), softcap=softcap)
    call["alibi_slopes"] = torch.rand(64)
    check(call, shape, softcap=softcap)


def test_many_sequences_and_none() -> None:
    for keys in (lengths(3000, 40), (0,) * 9, ()):
        shape = Shape((1,) * len(keys), keys, 8, 2, 128, dtype=BF16)
        check(paged(shape, 16, spare_rows=3), shape)


def test_one_long_sequence_on_one_head() -> None:
    shape = Shape((1, 1), (100_000, 4000), 8, 1, 128, dtype=BF16)
    check(paged(shape, 16), shape)
    check(paged(shape, 16), shape, split_keys=128)


def test_a_cache_beyond_32_bits_of_elements() -> None:
    pages, page_size, kv_heads, head_dim = 20_000, 64, 8, 256  # 2.6e9 elements
    key = torch.full((pages, page_size, kv_heads, head_dim), torch.nan, dtype=BF16, device="cuda")
    last = torch.tensor([pages - 1, 12_345, 0], device="cuda")
    key[last] = torch.randn(3, page_size, kv_heads, head_dim, dtype=BF16, device="cuda")
    call = {
        "query": torch.randn(1, 8, head_dim, dtype=BF16, device="cuda"),
        "key": key,
        "value": key,
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
        "block_table": last.int()[None],
        "seqused_k": torch.tensor([150], dtype=torch.int32, device="cuda"),
    }
    given = {"max_seqlen_q": 1, "max_seqlen_k": 150}
    out, lse = attend(call, **given)
    few = key[last].cpu()
    small = {name: tensor.cpu() for name, tensor in call.items() if name not in ("key", "value")}
    small |= {"key": few, "value": few, "block_table": torch.tensor([[0, 1, 2]], dtype=torch.int32)}
    assert_as_exact_as_pytorch(out, lse, small, **given)


def test_a_graph_is_replayed_after_lengths_changed() -> None:
    shape = Shape((1,) * 8, (900,) * 8, 32, 8, 128, dtype=BF16)
    host = paged(shape, 16)
    call, given = to(host, "cuda"), bounds(shape)
    attend(call, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(call, **given)
    for keys in ((900,) * 8, (0, 1, 16, 17, 300, 899, 5, 0), (0,) * 8, (900, 3, 3, 3, 3, 3, 3, 3)):
        now = torch.tensor(keys, dtype=torch.int32)
        call["seqused_k"].copy_(now)
        graph.replay()
        eager, eager_lse = attend(call, **given)
        assert torch.equal(out, eager)
        assert torch.equal(lse, eager_lse)
        assert_as_exact_as_pytorch(out, lse, {**host, "seqused_k": now}, **given)


def test_a_thousand_repetitions_give_the_same_bits() -> None:
    shape = Shape((1,) * 24, lengths(24, 9000), 32, 8, 128, dtype=BF16)
    call, given = to(paged(shape, 16), "cuda"), bounds(shape)
    first, _ = attend(call, **given)
    assert all(torch.equal(attend(call, **given)[0], first) for _ in range(1000))


def test_with_split_keys_a_sequence_alone_has_the_bits_that_it_has_in_a_batch() -> None:
    shape = Shape((1,) * 24, lengths(24, 9000), 32, 8, 128, dtype=BF16)
    call = to(paged(shape, 16), "cuda")
    given = {**bounds(shape), "split_keys": 256}
    together, _ = attend(call, **given)
    for index in range(24):
        alone = {
            **call,
            "query": call["query"][index : index + 1],
            "cu_seqlens_q": call["cu_seqlens_q"][:2],
            "block_table": call["block_table"][index : index + 1],
            "seqused_k": call["seqused_k"][index : index + 1],
        }
        assert torch.equal(attend(alone, **given)[0][0], together[index])


def test_two_problems_in_turns_share_the_workspace_of_a_stream() -> None:
    """Launches follow one another without a pause, eager and in a graph, and each starts while the one before ends."""
    shapes = (
        Shape((8,) * 3, (9000, 700, 40), 8, 2, 128, dtype=BF16),
        Shape((1,) * 5, (20000, 1, 0, 129, 700), 32, 8, 128, dtype=BF16),
        Shape((1,), (5000,), 8, 1, 64, dtype=FP16),
    )
    calls = [
        (to(paged(shape, page, seed), "cuda"), bounds(shape))
        for seed, (shape, page) in enumerate(zip(shapes, (16, 64, 1), strict=True))
    ]
    alone = []
    for call, given in calls:
        alone.append(attend(call, **given))
        torch.cuda.synchronize()
    for (call, given), shape in zip(calls, shapes, strict=True):
        result = attend(call, **given)
        assert_as_exact_as_pytorch(*result, to(call, "cpu"), **bounds(shape))

    def in_turns() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [attend(call, **given) for _ in range(20) for call, given in calls]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = in_turns()
    eager = in_turns()
    graph.replay()
    torch.cuda.synchronize()
    for results in (eager, captured):
        for number, (out, lse) in enumerate(results):
            assert torch.equal(out, alone[number % 3][0])
            assert torch.equal(lse, alone[number % 3][1])


def test_two_graphs_share_the_workspace_of_a_stream() -> None:
    """Captured apart and replayed by turns, as a server has one for each size of batch."""
    shapes = (
        Shape((1,) * 5, (20000, 1, 0, 129, 700), 32, 8, 128, dtype=BF16),
        Shape((4,) * 2, (9000, 700), 32, 8, 128, dtype=BF16),
    )
    calls = [(to(paged(shape, 16, seed), "cuda"), bounds(shape)) for seed, shape in enumerate(shapes)]
    graphs, results, alone = [], [], []
    for call, given in calls:
        alone.append(attend(call, **given))
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results.append([attend(call, **given) for _ in range(10)])
    for _ in range(20):
        for graph in graphs:
            graph.replay()
    torch.cuda.synchronize()
    for first, captured in zip(alone, results, strict=True):
        for out, lse in captured:
            assert torch.equal(out, first[0])
            assert torch.equal(lse, first[1])


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_sequences_share_pages(page_size: int) -> None:
    """Sequences that begin alike have the pages of that beginning in common."""
    shape = Shape((1, 2, 1), (900, 800, 641), 32, 8, 128, dtype=BF16)
    host = paged(shape, page_size)
    shared = 640 // page_size
    host["block_table"][1:, :shared] = host["block_table"][0, :shared]
    check(host, shape)


def test_two_threads_on_streams_of_their_own_have_workspaces_of_their_own() -> None:
    shape = Shape((1,) * 4, (9000, 700, 40, 1), 32, 8, 128, dtype=BF16)
    calls = [to(paged(shape, 16, seed), "cuda") for seed in range(2)]
    alone = [attend(call, **bounds(shape))[0] for call in calls]
    torch.cuda.synchronize()

    def work(number: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [attend(calls[number], **bounds(shape))[0] for _ in range(200)]
            torch.cuda.current_stream().synchronize()
        return all(torch.equal(result, alone[number]) for result in results)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, range(2)))


def test_ten_thousand_growing_steps_make_one_plan() -> None:
    """Lengths, their bounds and the batch change from step to step; every thousandth result is looked at."""
    shape = Shape((1,) * 8, (1200,) * 8, 8, 2, 64, dtype=BF16)
    host = paged(shape, 16)
    call = to(host, "cuda")
    for step in range(1, 10_001):
        batch, keys = step % 8 + 1, step * 1200 // 10_000 + 1
        now = {
            **call,
            "query": call["query"][:batch],
            "cu_seqlens_q": call["cu_seqlens_q"][: batch + 1],
            "block_table": call["block_table"][:batch],
            "seqused_k": call["seqused_k"][:batch],
        }
        if step % 1000 == 0:
            call["seqused_k"].fill_(min(keys, 1200))
        result = attention_varlen(**now, max_seqlen_q=1, max_seqlen_k=1200 + step)
        if step % 1000 == 0:
            assert_as_exact_as_pytorch(result, None, to(now, "cpu"), max_seqlen_q=1, max_seqlen_k=1200 + step)
    assert len(launch._runs) == 1


@pytest.mark.parametrize(("head_dim", "split_keys"), [(64, None), (128, 512), (128, None)])
def test_a_graph_of_more_launches_than_there_are_counters(
    head_dim: int, split_keys: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the graph has counters of its own, which had shared their memory with what blocks leave each other."""
    zeros = torch.zeros(2 * MOST_ARRIVALS, dtype=torch.int32, device="cuda")
    pool = TicketPool(zeros, MOST_ARRIVALS)
    monkeypatch.setattr(decode_kernel, "decode_arrival_pool", lambda device: pool)
    shape = Shape((1,), (8192,), 32, 8, head_dim, dtype=BF16)
    calls = [to(paged(shape, 64, seed), "cuda") for seed in range(5)]
    given = {**bounds(shape), "split_keys": split_keys}
    alone = [attend(call, **given) for call in calls]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [attend(call, **given) for _ in range(8) for call in calls]
    for _ in range(3):
        for out, lse in captured:
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
        graph.replay()
        for number, (out, lse) in enumerate(captured):
            assert torch.equal(out, alone[number % 5][0])
            assert torch.equal(lse, alone[number % 5][1])
