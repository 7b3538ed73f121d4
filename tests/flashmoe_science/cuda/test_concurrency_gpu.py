"""Streams, threads, graphs and devices: every kernel, with other launches of it in flight."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpu_attention import choices, random_qkv

from flashmoe_science.cuda import Choice, KernelKind, forward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class Call:
    """One causal call with its expected bits; `check` compares on the device, without waiting for it."""

    def __init__(self, choice: Choice, seqlen: int, head_dim: int) -> None:
        self.tensors = random_qkv((seqlen, seqlen), head_dim, batch=1, heads=(8, 4))
        self.choice = choice
        self.expected = self()
        torch.cuda.synchronize()

    def __call__(self) -> torch.Tensor:
        return forward(*self.tensors, causal=True, choice=self.choice)[0]

    def check(self, different: torch.Tensor) -> None:
        different += (self() != self.expected).sum()


def calls_of(kind: KernelKind) -> list[Call]:
    """Calls of one kernel with different shapes; skips where it takes none of them on this GPU."""
    found = []
    # Long ones overlap on the GPU, short ones follow each other closely.
    for seqlen, head_dim in ((2500, 64), (1100, 128), (300, 64), (96, 64), (64, 128)):
        q, k, v = random_qkv((seqlen, seqlen), head_dim, batch=1, heads=(8, 4))
        for choice in choices(q, k, v, causal=True):
            if choice.kernel is kind:
                found.append(Call(choice, seqlen, head_dim))
    if not found:
        pytest.skip(f"the {kind.value} kernel does not run on this GPU")
    return found


def zero() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device="cuda")


def run_in_threads(work: list[Callable[[], None]]) -> None:
    """Run all at once; re-raise what one of them raised."""
    with ThreadPoolExecutor(max_workers=len(work)) as pool:
        for future in [pool.submit(item) for item in work]:
            future.result()


@pytest.mark.parametrize("kind", KernelKind)
def test_two_streams(kind: KernelKind) -> None:
    calls = calls_of(kind)
    streams = [torch.cuda.Stream() for _ in range(3)]
    different = [zero() for _ in streams]
    torch.cuda.synchronize()
    for turn in range(300):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                calls[(turn + number) % len(calls)].check(different[number])
    torch.cuda.synchronize()
    assert [count.item() for count in different] == [0] * len(streams)


@pytest.mark.parametrize("kind", KernelKind)
@pytest.mark.parametrize("shared_stream", [False, True])
def test_threads(kind: KernelKind, shared_stream: bool) -> None:
    calls = calls_of(kind)
    one = torch.cuda.Stream()
    different = [zero() for _ in range(4)]
    torch.cuda.synchronize()

    def work(number: int) -> Callable[[], None]:
        def body() -> None:
            with torch.cuda.stream(one if shared_stream else torch.cuda.Stream()):
                for turn in range(100):
                    calls[(turn + number) % len(calls)].check(different[number])

        return body

    run_in_threads([work(number) for number in range(4)])
    torch.cuda.synchronize()
    assert [count.item() for count in different] == [0] * 4


@pytest.mark.parametrize("kind", KernelKind)
def test_a_graph_replays_on_new_data(kind: KernelKind) -> None:
    for call in calls_of(kind):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        graph.replay()
        assert torch.equal(out, call.expected)
        call.tensors[0].copy_(torch.randn_like(call.tensors[0]))
        graph.replay()
        assert torch.equal(out, call())


@pytest.mark.parametrize("kind", KernelKind)
def test_graphs_on_several_streams_beside_eager_calls(kind: KernelKind) -> None:
    """Two graphs in flight at once, one of them on two streams in turn, and eager calls beside them."""
    calls = calls_of(kind)
    different = [zero() for _ in range(3)]
    graphs = []
    torch.cuda.synchronize()
    for number in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call.check(different[number])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for turn in range(100):
        with torch.cuda.stream(streams[turn % 2]):
            graphs[0].replay()
        with torch.cuda.stream(streams[2]):
            graphs[1].replay()
        calls[turn % len(calls)].check(different[2])
    torch.cuda.synchronize()
    assert [count.item() for count in different] == [0, 0, 0]


@pytest.mark.parametrize("kind", KernelKind)
def test_branches_of_one_graph(kind: KernelKind) -> None:
    """Launches that the graph may run side by side."""
    calls = calls_of(kind)
    different = [zero() for _ in range(2)]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        for call in calls:
            call.check(different[0])
        with torch.cuda.stream(side):
            for call in calls:
                call.check(different[1])
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert [count.item() for count in different] == [0, 0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", KernelKind)
def test_the_device_is_the_tensors(kind: KernelKind) -> None:
    """Whatever device is current; and two devices at once, from one thread each."""
    calls = calls_of(kind)
    for call in calls:
        there = [tensor.to("cuda:1") for tensor in call.tensors]
        out, lse = forward(*there, causal=True, return_lse=True, choice=call.choice)
        assert out.device == there[0].device
        assert lse is not None
        assert lse.device == there[0].device
        assert torch.cuda.current_device() == 0
        assert torch.equal(out.to("cuda:0"), call.expected)

    def work(device: int) -> Callable[[], None]:
        def body() -> None:
            for call in calls:
                tensors = [tensor.to(f"cuda:{device}") for tensor in call.tensors]
                expected = call.expected.to(f"cuda:{device}")
                for _ in range(50):
                    out, _ = forward(*tensors, causal=True, choice=call.choice)
                    assert torch.equal(out, expected)

        return body

    run_in_threads([work(0), work(1), work(0), work(1)])
