"""The routing kernel on a GPU, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from topk_reference import reference

from flashmoe_science import topk_routing, topk_routing_with_losses
from flashmoe_science.cuda.moe.topk import topk
from flashmoe_science.errors import InputError
from flashmoe_science.moe_arguments import RENORMALIZE_FLOOR, Scores

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("scores", Scores)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", [1, 5, 8, 9, 32, 60, 128, 200, 256, 384, 512, 1000, 1024])
def test_without_a_bias(experts: int, dtype: torch.dtype, scores: Scores) -> None:
    torch.manual_seed(experts)
    for tokens, k, renormalize in (
        (1, 1, False),
        (333, min(8, experts), True),
        (70, min(40, experts), False),
    ):
        logits = (4 * torch.randn(tokens, experts, device="cuda")).to(dtype)
        weights, ids = topk(logits, k, scores=scores, renormalize=renormalize, scale=1.5)
        exact, exact_ids = reference(logits, k, scores, renormalize, None, 1.5)
        assert torch.equal(ids.long(), exact_ids)
        torch.testing.assert_close(weights.double(), exact, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("scores", Scores)
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (64, 6), (256, 8), (1024, 32)])
def test_a_bias_changes_the_choice_and_not_the_weights(experts: int, k: int, scores: Scores) -> None:
    torch.manual_seed(experts)
    logits = torch.randn(500, experts, device="cuda")
    # Apart by more than rounding, so that the choice is certain.
    values = (logits.softmax(1) if scores is Scores.SOFTMAX else logits.sigmoid()).double()
    bias = torch.randn(experts, device="cuda")
    weights, ids = topk(logits, k, scores=scores, bias=bias)
    exact, exact_ids = reference(logits, k, scores, True, bias, 1.0)
    rank = values + bias.double()
    apart = (rank.gather(1, ids.long()) - rank.gather(1, exact_ids)).abs()
    assert apart.max() < 1e-6
    same = (ids.long() == exact_ids).all(1)
    assert same.float().mean() > 0.9
    torch.testing.assert_close(weights[same].double(), exact[same], rtol=1e-5, atol=1e-30)
    assert (ids.sort(1).values.diff(dim=1) > 0).all()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("experts", "groups", "top_groups", "k"),
    [(256, 8, 4, 8), (8, 4, 2, 3), (32, 32, 5, 5), (60, 6, 2, 6), (8, 2, 1, 4), (1024, 32, 3, 40)],
)
def test_groups(experts: int, groups: int, top_groups: int, k: int, biased: bool) -> None:
    torch.manual_seed(experts)
    logits = torch.randn(500, experts, device="cuda")
    bias = torch.randn(experts, device="cuda") / 4 if biased else None
    options = {"groups": groups, "top_groups": top_groups}
    weights, ids = topk(logits, k, scores=Scores.SIGMOID, bias=bias, scale=2.5, **options)
    exact, exact_ids = reference(logits, k, Scores.SIGMOID, True, bias, 2.5, **options)
    same = (ids.long() == exact_ids).all(1)
    assert same.float().mean() > 0.98
    torch.testing.assert_close(weights[same].double(), exact[same], rtol=1e-5, atol=1e-30)
    size = experts // groups
    assert all(len(set((row // size).tolist())) <= top_groups for row in ids)


def test_ties_infinities_and_nan() -> None:
    inf, nan = torch.inf, torch.nan
    for experts in (8, 40, 300):
        logits = torch.zeros(7, experts, device="cuda")
        logits[1, 3:6] = 2.0
        logits[2, ::2] = nan
        logits[3] = -inf
        logits[4] = nan
        logits[5, 6] = inf
        logits[6, 1:] = -inf
        weights, ids = topk(logits, 5)
        exact, exact_ids = reference(logits, 5, Scores.SOFTMAX, True, None, 1.0)
        assert torch.equal(ids.long(), exact_ids)
        torch.testing.assert_close(weights.double(), exact, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_no_tokens_and_too_many_experts() -> None:
    weights, ids = topk(torch.empty(0, 16, device="cuda"), 4)
    assert weights.shape == ids.shape == (0, 4)
    with pytest.raises(InputError, match="1500 experts; the CUDA kernel takes at most 1024"):
        topk(torch.empty(2, 1500, device="cuda"), 4)


def test_captured_in_a_graph() -> None:
    logits = torch.randn(100, 64, device="cuda")
    topk(logits, 4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids = topk(logits, 4)
    logits.copy_(torch.randn(100, 64))
    graph.replay()
    expected_weights, expected_ids = topk(logits, 4)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(weights, expected_weights)


OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax as it is": {"renormalize": False, "scaling_factor": 0.5},
    "softmax with groups": {"groups": 8, "top_groups": 4},
    "sigmoid": {"scores": "sigmoid", "scaling_factor": 2.5},
    "sigmoid as it is": {"scores": "sigmoid", "renormalize": False},
    "sigmoid with groups": {"scores": "sigmoid", "scaling_factor": 2.5, "groups": 8, "top_groups": 4},
}


@pytest.mark.parametrize("with_losses", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_the_weights(name: str, biased: bool, dtype: torch.dtype, with_losses: bool) -> None:
    """Against float64 for the same choice, from calls with and without losses, whose gradient is a kernel's."""
    torch.manual_seed(3)
    options = OPTIONS[name]
    logits = torch.randn(300, 64, device="cuda").to(dtype).requires_grad_()
    bias = torch.randn(64, device="cuda") if biased else None
    routed = topk_routing_with_losses if with_losses else topk_routing
    weights, ids, *_ = routed(logits, 6, correction_bias=bias, **options)
    incoming = torch.randn(300, 6, device="cuda")
    (gradient,) = torch.autograd.grad(weights, logits, incoming)
    exact = logits.detach().double().requires_grad_()
    scores = exact.sigmoid() if options.get("scores") == "sigmoid" else exact.softmax(1)
    right = scores.gather(1, ids.long())
    if options.get("renormalize", True):
        right = right / (right.sum(1, keepdim=True) + RENORMALIZE_FLOOR)
    right = right * options.get("scaling_factor", 1.0)
    torch.testing.assert_close(weights.double(), right, rtol=1e-5, atol=1e-30)
    (expected,) = torch.autograd.grad(right, exact, incoming.double())
    assert gradient.dtype is dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    # What is subtracted from one another may be larger than what is left.
    parts = options.get("scaling_factor", 1.0) * float(incoming.abs().max())
    torch.testing.assert_close(gradient.double(), expected, rtol=tolerance, atol=1e-6 * parts)
