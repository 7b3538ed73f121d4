"""`attention_varlen` by the Hopper kernel for decode steps on a GPU: rows, pages, graphs, equal bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from varlen_cases import Shape, bounds, forget_calls, packed, paged, to
from varlen_gpu import attend, check, lengths
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science.configs.attention.decode import MOST_ARRIVALS
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.tickets import TicketPool
from flashmoe_science.cuda.varlen import decode_hopper
from flashmoe_science.cuda.varlen.select import OVERRIDE_VARIABLE
from flashmoe_science.cuda.wgmma import why_not_device

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def by_this_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = why_not_device(device_of(torch.cuda.current_device()))
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv(OVERRIDE_VARIABLE, "decode_hopper")
    forget_calls(monkeypatch)  # those of tests of another kernel


@pytest.mark.parametrize("page_size", [0, 1, 5, 16, 24, 48, 64, 544])
@pytest.mark.parametrize("queries", [1, 8])
def test_pages(page_size: int, queries: int) -> None:
    for keys in ((3000, 1, 0, 129, 16, 700), (3000, 40000, 17), lengths(200, 600)):
        shape = Shape((queries,) * len(keys), keys, 32, 8, 128, dtype=BF16)
        call = (
            paged(shape, page_size, garbage=1 << 30, spare_rows=2)
            if page_size
            else packed(shape, spare_keys=3)
        )
        check(call, shape)


@pytest.mark.parametrize("layout", ["HND", "joint", "interleaved"])
def test_strides(layout: str) -> None:
    shape = Shape((4,) * 30, lengths(30, 900), 8, 2, 128, dtype=BF16)
    check(paged(shape, 16, layout=layout), shape)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (128, 64), (64, 128)])
@pytest.mark.parametrize("heads", [(2, 2), (12, 1), (32, 4), (64, 4)])
def test_rows_and_dimensions(heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> None:
    shape = Shape((1, 2, 4, 0, 3), (100, 2000, 31, 8, 3), *heads, *dims, dtype)
    check(paged(shape, 16), shape)


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("window", [(-1, -1), (127, 0), (300, 2)])
def test_options(softcap: float, window: tuple[int, int]) -> None:
    shape = Shape((3,) * 40, lengths(40, 3000), 64, 8, 64, dtype=BF16)
    call = paged(shape, 16, garbage=1 << 30)
    call["sinks"] = 3 * torch.randn(64)
    check(call, shape, window=window, softcap=softcap)


def test_many_sequences_and_none() -> None:
    for keys in (lengths(3000, 40), (0,) * 9, ()):
        shape = Shape((2,) * len(keys), keys, 8, 2, 128, dtype=BF16)
        check(paged(shape, 16, spare_rows=3), shape)


def test_one_long_sequence_on_one_head() -> None:
    shape = Shape((4, 1), (100_000, 4000), 8, 1, 128, dtype=BF16)
    check(paged(shape, 16), shape)


def test_a_graph_is_replayed_after_lengths_changed() -> None:
    shape = Shape((4,) * 8, (900,) * 8, 32, 8, 128, dtype=BF16)
    host = paged(shape, 16)
    call, given = to(host, "cuda"), bounds(shape)
    attend(call, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(call, **given)
    for keys in ((900,) * 8, (4, 4, 16, 17, 300, 899, 5, 64), (900, 4, 4, 4, 4, 4, 4, 4)):
        now = torch.tensor(keys, dtype=torch.int32)
        call["seqused_k"].copy_(now)
        graph.replay()
        eager, eager_lse = attend(call, **given)
        assert torch.equal(out, eager)
        assert torch.equal(lse, eager_lse)
        assert_as_exact_as_pytorch(out, lse, {**host, "seqused_k": now}, **given)


@pytest.mark.parametrize("page_size", [1, 16])
def test_with_split_keys_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(page_size: int) -> None:
    shape = Shape((4,) * 5, (900, 4, 33, 5000, 700), 32, 8, 128, dtype=BF16)
    host = paged(shape, page_size)
    check(host, shape, split_keys=256)
    call, given = to(host, "cuda"), {**bounds(shape), "split_keys": 256}
    out, lse = attend(call, **given)
    for index in range(len(shape.keys)):
        rows = slice(4 * index, 4 * index + 4)
        alone = {
            **call,
            "query": call["query"][rows].contiguous(),
            "cu_seqlens_q": call["cu_seqlens_q"][:2],
            "block_table": call["block_table"][index : index + 1],
            "seqused_k": call["seqused_k"][index : index + 1],
        }
        by_itself, lse_by_itself = attend(alone, **given)
        assert torch.equal(by_itself, out[rows])
        assert torch.equal(lse_by_itself, lse[rows])


@pytest.mark.parametrize("pieces", [16, 17, 33, 65])
def test_with_split_keys_neighbours_have_slots_of_their_own(pieces: int) -> None:
    """About a set for each block, so that most have one alone, and its slots lie beside those of others."""
    shape = Shape((1,) * 16, (128 * pieces,) * 16, 32, 8, 128, dtype=BF16)
    call, given = to(paged(shape, 64), "cuda"), {**bounds(shape), "split_keys": 128}
    first = {**call, "query": call["query"][:1], "cu_seqlens_q": call["cu_seqlens_q"][:2]}
    first = {**first, "block_table": call["block_table"][:1], "seqused_k": call["seqused_k"][:1]}
    out, lse = attend(call, **given)
    alone, lse_alone = attend(first, **given)
    assert torch.equal(alone, out[:1])
    assert torch.equal(lse_alone, lse[:1])
    assert all(torch.equal(attend(call, **given)[0], out) for _ in range(200))


@pytest.mark.parametrize("queries", [1, 4, 8])
def test_a_thousand_repetitions_give_the_same_bits(queries: int) -> None:
    """Also where memory is so busy that tiles come late and in another order."""
    shape = Shape((queries,) * 64, (4096,) * 64, 32, 8, 128, dtype=BF16)
    call, given = to(paged(shape, 64), "cuda"), bounds(shape)
    first, _ = attend(call, **given)
    assert all(torch.equal(attend(call, **given)[0], first) for _ in range(1000))


def test_beside_the_other_decode_kernel_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a workspace and counters, and each starts while the one before ends."""
    shape = Shape((8,) * 3, (9000, 700, 40), 8, 2, 128, dtype=BF16)
    other_shape = Shape((1,) * 5, (20000, 1, 0, 129, 700), 32, 8, 128, dtype=BF16)
    slopes = torch.rand(32)  # for which the other one is taken
    call = to(paged(shape, 64, 0), "cuda")
    other_call = to({**paged(other_shape, 64, 1), "alibi_slopes": slopes}, "cuda")
    given, by_the_other = bounds(shape), bounds(other_shape)
    alone = attend(call, **given)
    monkeypatch.delenv(OVERRIDE_VARIABLE)
    forget_calls(monkeypatch)
    other_alone = attend(other_call, **by_the_other)
    torch.cuda.synchronize()
    mixed = [(attend(call, **given), attend(other_call, **by_the_other)) for _ in range(50)]
    torch.cuda.synchronize()
    for results, other_results in mixed:
        assert all(map(torch.equal, results, alone))
        assert all(map(torch.equal, other_results, other_alone))


def test_two_threads_on_streams_of_their_own_have_workspaces_of_their_own() -> None:
    shape = Shape((8,) * 4, (9000, 700, 40, 8), 32, 8, 128, dtype=BF16)
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


def test_a_graph_of_more_launches_than_there_are_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros(2 * MOST_ARRIVALS, dtype=torch.int32, device="cuda")
    pool = TicketPool(zeros, MOST_ARRIVALS)
    monkeypatch.setattr(decode_hopper, "decode_arrival_pool", lambda device: pool)
    shape = Shape((8,), (8192,), 32, 8, 128, dtype=BF16)
    calls = [to(paged(shape, 64, seed), "cuda") for seed in range(5)]
    alone = [attend(call, **bounds(shape)) for call in calls]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [attend(call, **bounds(shape)) for _ in range(8) for call in calls]
    for _ in range(3):
        for out, lse in captured:
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
        graph.replay()
        for number, (out, lse) in enumerate(captured):
            assert torch.equal(out, alone[number % 5][0])
            assert torch.equal(lse, alone[number % 5][1])
