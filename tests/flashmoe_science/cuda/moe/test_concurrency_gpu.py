"""Streams, threads, graphs, devices and large tensors: every way through a mixture of experts."""

from __future__ import annotations

import pytest
import torch
from gpu_concurrency import (
    CheckedCall,
    check_branches_of_one_graph,
    check_graphs_beside_eager_calls,
    check_streams,
    check_threads,
)
from gpu_moe import assert_right, layer

from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.moe import MoeKind, forward
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.cuda.moe.select import module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# tokens, hidden, intermediate, experts, top_k: long ones overlap on the GPU, short ones follow each other closely.
LAYERS = [(1, 256, 144, 16, 2), (9, 512, 256, 60, 4), (40, 256, 272, 8, 2), (3000, 256, 128, 32, 4)]


class Call(CheckedCall):
    def __init__(self, choice: Choice, sizes: tuple[int, int, int, int, int]) -> None:
        given = layer(*sizes)
        self.tensors = (
            *(given.hidden_states, given.w13, given.w2),
            *(given.topk_weights, given.topk_ids),
        )
        self.choice = choice
        super().__init__(lambda: forward(*self.tensors, choice=choice))


def chosen(kind: MoeKind, problem: MoeProblem) -> Choice | None:
    return module(kind).choose(problem, device_of(0))


def calls_of(kind: MoeKind) -> list[Call]:
    torch.manual_seed(11)
    calls = []
    for sizes in LAYERS:
        choice = chosen(kind, layer(*sizes).problem)
        if choice is not None:
            calls.append(Call(choice, sizes))
    if not calls:
        pytest.skip(f"the way {kind.value} does not run on this GPU")
    return calls


@pytest.mark.parametrize("kind", MoeKind)
def test_streams(kind: MoeKind) -> None:
    check_streams(calls_of(kind), turns=200)


@pytest.mark.parametrize("kind", MoeKind)
@pytest.mark.parametrize("shared_stream", [False, True])
def test_threads(kind: MoeKind, shared_stream: bool) -> None:
    check_threads(calls_of(kind), 50, shared_stream)


@pytest.mark.parametrize("kind", MoeKind)
def test_graphs_on_several_streams_beside_eager_calls(kind: MoeKind) -> None:
    check_graphs_beside_eager_calls(calls_of(kind), turns=50)


@pytest.mark.parametrize("kind", MoeKind)
def test_branches_of_one_graph(kind: MoeKind) -> None:
    check_branches_of_one_graph(calls_of(kind), turns=50)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", MoeKind)
def test_the_device_is_the_tensors(kind: MoeKind) -> None:
    """Whatever device is current."""
    for call in calls_of(kind):
        there = [tensor.to("cuda:1") for tensor in call.tensors]
        out = forward(*there, choice=call.choice)
        assert out.device == there[0].device
        assert torch.cuda.current_device() == 0
        assert torch.equal(out.to("cuda:0"), call.expected)


NEEDS_64_GB = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 64 << 30,
    reason="needs 64 GB of GPU memory",
)


@NEEDS_64_GB
@pytest.mark.parametrize(
    # w13 of 6.4 GB, w2 of 3.2 GB; 300,000 slots, so that a row for each takes 4.9 GB.
    ("sizes", "kinds"),
    [
        ((20, 8192, 32768, 6, 2), tuple(MoeKind)),
        ((37500, 8192, 16, 16, 8), (MoeKind.HOPPER, MoeKind.PORTABLE)),
    ],
    ids=["weights", "rows"],
)
def test_more_than_32_bits_address(sizes: tuple[int, int, int, int, int], kinds: tuple[MoeKind, ...]) -> None:
    torch.manual_seed(12)
    given = layer(*sizes)
    choices = [chosen(kind, given.problem) for kind in kinds]
    assert_right(given, [choice for choice in choices if choice is not None])
