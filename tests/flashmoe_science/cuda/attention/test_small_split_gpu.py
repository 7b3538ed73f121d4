"""The small-shape kernel with its keys split over the grid, on a GPU: right, always the same bits, and beside other
launches of it in streams, threads and graphs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpu_attention import assert_right, random_qkv

from flashmoe_science.configs.attention.small import SmallConfiguration
from flashmoe_science.cuda.attention import KernelKind, forward
from flashmoe_science.cuda.choice import Choice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# Rows and keys: no keys, fewer keys than splits, a ragged end, several blocks of rows, keys that a mask hides from all.
LENGTHS = [(1, 0), (1, 1), (1, 203), (2, 4099), (16, 512), (40, 7), (3, 20_000)]
SHAPES = [(64, 8, 1), (64, 8, 2), (64, 4, 2), (128, 8, 1), (128, 4, 2), (256, 4, 1)]
"""Head dim, warps, key tiles."""


def split(
    head_dim: int, splits: int, *, row_tiles: int = 1, warps: int = 4, key_tiles: int = 1, cluster: int = 1
) -> Choice:
    early = torch.cuda.get_device_capability() >= (9, 0)
    return Choice(
        KernelKind.SMALL,
        SmallConfiguration(
            head_dim, True, row_tiles, warps, key_tiles, cluster, dependent=early, splits=splits
        ),
    )


@pytest.mark.parametrize("splits", [2, 7, 16, 33])
@pytest.mark.parametrize(("head_dim", "warps", "key_tiles"), SHAPES)
def test_every_length(head_dim: int, warps: int, key_tiles: int, splits: int) -> None:
    choice = split(head_dim, splits, warps=warps, key_tiles=key_tiles)
    for index, lengths in enumerate(LENGTHS):
        q, k, v = random_qkv(
            lengths,
            head_dim - 24 * (index % 2),
            heads=(8, (8, 2, 1)[index % 3]),
            dtype=torch.float16 if index % 2 else torch.bfloat16,
            rows_first=index % 3 == 0,
        )
        assert_right(q, k, v, causal=index % 2 == 0, only=[choice], rows_first=index % 3 == 0)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs clusters"
)
@pytest.mark.parametrize("cluster", [2, 4])
@pytest.mark.parametrize("row_tiles", [1, 2])
def test_clusters_that_meet_in_memory(row_tiles: int, cluster: int) -> None:
    for lengths in LENGTHS:
        q, k, v = random_qkv(lengths, 128, batch=1, heads=(8, 2))
        choice = split(128, 5, row_tiles=row_tiles, cluster=cluster)
        assert_right(q, k, v, causal=True, only=[choice])


def test_scores_of_any_size() -> None:
    q, k, v = random_qkv((1, 5000), 128, heads=(8, 1))
    q *= 40
    k[:, :, ::7] *= -3
    assert_right(q, k, v, causal=False, only=[split(128, 13)], most=0.05)


@pytest.mark.parametrize("seqlen_k", [17, 3001])
def test_an_infinity_in_the_last_value(seqlen_k: int) -> None:
    q, k, v = random_qkv((1, seqlen_k), 64)
    v[:, :, -1] = torch.inf
    out, _ = forward(q, k, v, choice=split(64, 7))
    assert out.isposinf().all()


class Call:
    """One call with its expected bits; `check` compares on the device, without waiting for it."""

    def __init__(self, keys: int, head_dim: int, heads: tuple[int, int], splits: int) -> None:
        self.tensors = random_qkv((1, keys), head_dim, batch=1, heads=heads)
        self.choice = split(head_dim, splits)
        self.expected = self()
        torch.cuda.synchronize()

    def __call__(self) -> torch.Tensor:
        return forward(*self.tensors, choice=self.choice)[0]

    def check(self, different: torch.Tensor) -> None:
        different += (self() != self.expected).sum()


def calls() -> list[Call]:
    """Of different numbers of heads and splits, so that each finds counters as others left them."""
    return [
        Call(9000, 128, (32, 8), 16),
        Call(700, 64, (4, 4), 5),
        Call(5000, 128, (8, 1), 60),
        Call(3000, 64, (16, 16), 9),
    ]


def zero() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device="cuda")


def test_two_thousand_times_the_same_bits() -> None:
    different = zero()
    every = calls()
    for turn in range(2000):
        every[turn % len(every)].check(different)
    assert different.item() == 0


def test_a_chain_of_calls_sees_each_ones_result() -> None:
    """Nothing else lies between them, so each starts while the one before ends."""
    q, k, v = random_qkv((1, 4000), 64, batch=1, heads=(8, 8))
    choice = split(64, 16)

    def chain(wait: bool) -> torch.Tensor:
        x = q
        for _ in range(100):
            x, _ = forward(x, k, v, choice=choice)
            if wait:
                torch.cuda.synchronize()
        return x

    expected = chain(wait=True)
    for _ in range(10):
        assert torch.equal(chain(wait=False), expected)


def test_streams_and_threads() -> None:
    every = calls()
    different = [zero() for _ in range(6)]
    torch.cuda.synchronize()
    shared = torch.cuda.Stream()

    def work(number: int) -> None:
        with torch.cuda.stream(shared if number < 2 else torch.cuda.Stream()):
            for turn in range(150):
                every[(turn + number) % len(every)].check(different[number])

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, number) for number in range(6)]:
            done.result()
    torch.cuda.synchronize()
    assert [count.item() for count in different] == [0] * 6


def test_graphs_with_branches_on_several_streams_beside_eager_calls() -> None:
    every = calls()
    eager = zero()
    graphs, in_graphs = [], []
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(2):
        different = [zero(), zero()]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream())
            for call in every:
                call.check(different[0])
            with torch.cuda.stream(side):
                for call in reversed(every):
                    call.check(different[1])
            torch.cuda.current_stream().wait_stream(side)
        graphs.append(graph)
        in_graphs += different
    streams = [torch.cuda.Stream() for _ in range(3)]
    for turn in range(100):
        with torch.cuda.stream(streams[turn % 2]):
            graphs[0].replay()
        with torch.cuda.stream(streams[2]):
            graphs[1].replay()
        every[turn % len(every)].check(eager)
    torch.cuda.synchronize()
    assert [count.item() for count in (*in_graphs, eager)] == [0] * 5


def test_a_graph_replays_on_new_data() -> None:
    for call in calls():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        graph.replay()
        assert torch.equal(out, call.expected)
        call.tensors[0].copy_(torch.randn_like(call.tensors[0]))
        graph.replay()
        assert torch.equal(out, call())


def test_captured_launches_of_their_own_counters() -> None:
    """More of them than the pool has counters: the rest allocates."""
    call = Call(700, 64, (4, 4), 5)
    different = zero()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(8300):
            call()
        call.check(different)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert different.item() == 0
    call.check(different)
    assert different.item() == 0
