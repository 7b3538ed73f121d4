"""Streams, threads, graphs and devices: every kernel, with other launches of it in flight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_attention import choices, random_qkv
from gpu_concurrency import (
    CheckedCall,
    check_branches_of_one_graph,
    check_graphs_beside_eager_calls,
    check_streams,
    check_threads,
    run_in_threads,
)

from flashmoe_science.cuda.attention import KernelKind, forward
from flashmoe_science.cuda.choice import Choice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class Call(CheckedCall):
    """One causal call."""

    def __init__(self, choice: Choice, seqlen: int, head_dim: int) -> None:
        self.tensors = random_qkv((seqlen, seqlen), head_dim, batch=1, heads=(8, 4))
        self.choice = choice
        super().__init__(lambda: forward(*self.tensors, causal=True, choice=choice)[0])


def calls_of(kind: KernelKind) -> list[Call]:
    """Calls of one kernel with different shapes; skips where it takes none of them on this GPU."""
    calls = []
    # Long ones overlap on the GPU, short ones follow each other closely.
    for seqlen, head_dim in ((2500, 64), (1100, 128), (300, 64), (96, 64), (64, 128)):
        q, k, v = random_qkv((seqlen, seqlen), head_dim, batch=1, heads=(8, 4))
        for choice in choices(q, k, v, causal=True):
            if choice.kernel is kind:
                calls.append(Call(choice, seqlen, head_dim))
    if not calls:
        pytest.skip(f"the {kind.value} kernel does not run on this GPU")
    return calls


@pytest.mark.parametrize("kind", KernelKind)
def test_streams(kind: KernelKind) -> None:
    check_streams(calls_of(kind), turns=300)


@pytest.mark.parametrize("kind", KernelKind)
@pytest.mark.parametrize("shared_stream", [False, True])
def test_threads(kind: KernelKind, shared_stream: bool) -> None:
    check_threads(calls_of(kind), 100, shared_stream)


@pytest.mark.parametrize("kind", KernelKind)
def test_a_graph_replays_on_new_data(kind: KernelKind) -> None:
    for call in calls_of(kind):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call.run()
        graph.replay()
        assert torch.equal(out, call.expected)
        call.tensors[0].copy_(torch.randn_like(call.tensors[0]))
        graph.replay()
        assert torch.equal(out, call.run())


@pytest.mark.parametrize("kind", KernelKind)
def test_graphs_on_several_streams_beside_eager_calls(kind: KernelKind) -> None:
    check_graphs_beside_eager_calls(calls_of(kind), turns=100)


@pytest.mark.parametrize("kind", KernelKind)
def test_branches_of_one_graph(kind: KernelKind) -> None:
    check_branches_of_one_graph(calls_of(kind), turns=50)


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
