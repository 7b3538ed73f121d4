"""The Hopper path on a GPU: results against float64, for every kind of shape and routing."""

from __future__ import annotations

import pytest
import torch
from gpu_moe import Layer, assert_right, layer, random_ids, run_guarded

from flashmoe_science.configs.moe import hopper as configs
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.moe import MoeKind, forward
from flashmoe_science.moe_arguments import Activation, W13Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
]

CHOICES = [Choice(MoeKind.HOPPER, tile) for tile in configs.all_configurations()]
NARROW = Choice(MoeKind.HOPPER, configs.NARROW)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("w13_layout", list(W13Layout))
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations(dtype: torch.dtype, activation: Activation, w13_layout: W13Layout) -> None:
    given = layer(300, 256, 384, 6, 2, dtype=dtype, activation=activation, w13_layout=w13_layout)
    assert_right(given, [NARROW])


@pytest.mark.parametrize("activation", [Activation.GELU_TANH, Activation.RELU2_NO_MUL])
def test_activations_of_wide_tiles(activation: Activation) -> None:
    """A wide tile takes seconds to compile, so the rest is left to the narrow one, whose source is the same."""
    given = layer(
        300, 256, 384, 6, 2, dtype=torch.float16, activation=activation, w13_layout=W13Layout.INTERLEAVED
    )
    assert_right(given, CHOICES)


@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "experts", "top_k"),
    [
        (1, 16, 16, 1, 1),
        (1, 2048, 768, 128, 8),
        (7, 48, 80, 5, 5),
        (33, 272, 528, 3, 2),
        (64, 512, 336, 65, 8),
        (191, 64, 128, 2, 1),
        (193, 1040, 144, 4, 4),
        (257, 128, 1024, 600, 3),
        (1000, 2048, 768, 128, 8),
        (5000, 256, 128, 16, 2),
    ],
)
def test_sizes(tokens: int, hidden: int, intermediate: int, experts: int, top_k: int) -> None:
    assert_right(layer(tokens, hidden, intermediate, experts, top_k), CHOICES)


def routings() -> dict[str, tuple[int, torch.Tensor]]:
    """Experts and ids (tokens, top_k) of unusual routings."""
    generator = torch.Generator().manual_seed(3)
    tokens = 700
    sentinel = torch.randint(0, 8, (tokens, 4), generator=generator, dtype=torch.int32)
    sentinel[torch.rand(tokens, 4, generator=generator) < 0.5] = -1
    wide = torch.randint(-3, 12, (tokens, 2), generator=generator)
    wide[0, 0] = 1 << 40
    return {
        "one expert": (9, torch.full((tokens, 1), 4, dtype=torch.int32)),
        "one expert, all of a token": (9, torch.full((tokens, 3), 8, dtype=torch.int32)),
        "first and last": (40, torch.tensor([0, 39], dtype=torch.int32).repeat(tokens, 1)),
        "nobody": (8, torch.full((tokens, 2), -1, dtype=torch.int32)),
        "sentinels": (8, sentinel),
        "out of range, int64": (8, wide),
        "growing": (16, (torch.arange(tokens).sqrt().int() % 16)[:, None].repeat(1, 2)),
        "tile boundaries": (
            4,
            torch.repeat_interleave(torch.arange(4), torch.tensor([192, 193, 191, 124]))[:, None].int(),
        ),
    }


@pytest.mark.parametrize("name", list(routings()))
def test_routings(name: str) -> None:
    experts, ids = routings()[name]
    assert_right(layer(len(ids), 320, 160, experts, ids.shape[1], ids=ids.contiguous()), CHOICES)


def test_many_slots_are_sorted_by_several_blocks() -> None:
    assert_right(layer(9000, 64, 64, 300, 6), CHOICES)


def test_is_deterministic_and_right_however_often_it_runs() -> None:
    given = layer(4096, 512, 256, 32, 4)
    for choice in CHOICES:
        first = run_guarded(choice, given)
        for _ in range(20):
            assert torch.equal(first, run_guarded(choice, given)), choice


def test_a_graph_follows_other_routings() -> None:
    given = layer(512, 256, 256, 16, 2)
    tensors = (given.hidden_states, given.w13, given.w2, given.topk_weights, given.topk_ids)
    forward(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward(*tensors)
    for ids in (random_ids(512, 2, 16), torch.full((512, 2), 3), random_ids(512, 2, 16) - 8):
        given.topk_ids.copy_(ids)
        graph.replay()
        again = forward(*tensors)
        assert torch.equal(captured, again)
        changed = Layer(given.problem, *tensors[:4], given.topk_ids)
        assert_right(changed, CHOICES)


def test_out_and_no_tokens() -> None:
    given = layer(100, 128, 64, 4, 2)
    tensors = (given.hidden_states, given.w13, given.w2, given.topk_weights, given.topk_ids)
    out = torch.empty_like(given.hidden_states)
    assert forward(*tensors, out=out) is out
    assert torch.equal(out, forward(*tensors))
    none = forward(given.hidden_states[:0], given.w13, given.w2, given.topk_weights[:0], given.topk_ids[:0])
    assert none.shape == (0, 128)
    assert device_of(0).architecture == "sm_90"
