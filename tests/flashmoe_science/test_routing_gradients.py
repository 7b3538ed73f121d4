"""What autograd makes of routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from topk_reference import reference

from flashmoe_science import fused_moe, topk_routing, topk_routing_with_losses
from flashmoe_science.moe_arguments import RENORMALIZE_FLOOR, Scores
from flashmoe_science.operators.routing import TOPK_ROUTING
from flashmoe_science.routing_gradients import logits_gradient


def logits_of(tokens: int = 7, experts: int = 9, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(tokens, experts, generator=generator).to(dtype).requires_grad_()


OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "scores as they are": {"renormalize": False},
    "deepseek": {"scores": "sigmoid", "scaling_factor": 2.5},
    "deepseek with groups": {"scores": "sigmoid", "scaling_factor": 2.5, "groups": 3, "top_groups": 2},
    "sigmoid as it is": {"scores": "sigmoid", "renormalize": False},
}
each_option = pytest.mark.parametrize("name", OPTIONS)


@each_option
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_those_of_the_formula(name: str, biased: bool, dtype: torch.dtype) -> None:
    options = OPTIONS[name]
    logits = logits_of(dtype=dtype)
    bias = torch.linspace(-0.5, 0.5, 9) if biased else None
    weights, ids = topk_routing(logits, 3, correction_bias=bias, **options)
    incoming = torch.randn(7, 3, generator=torch.Generator().manual_seed(3))
    (gradient,) = torch.autograd.grad(weights, logits, incoming)
    exact = logits.detach().double().requires_grad_()
    right, chosen = reference(
        exact,
        3,
        Scores(options.get("scores", "softmax")),
        options.get("renormalize", True),
        bias,
        options.get("scaling_factor", 1.0),
        options.get("groups", 1),
        options.get("top_groups", 1),
    )
    assert torch.equal(ids.long(), chosen)
    (expected,) = torch.autograd.grad(right, exact, incoming.double())
    assert gradient.dtype is dtype
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(gradient.double(), expected, rtol=tolerance, atol=1e-6)


@each_option
def test_the_derivative_by_differences_and_once_more(name: str) -> None:
    options = OPTIONS[name]
    kind, renormalize = Scores(options.get("scores", "softmax")), options.get("renormalize", True)
    scale = options.get("scaling_factor", 1.0)
    logits = logits_of(3, 5).detach().double().requires_grad_()
    _, ids = reference(logits.detach(), 2, kind, renormalize, None, scale)
    grad = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def through(grad: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits_gradient(grad, logits, ids, scores=kind, renormalize=renormalize, scaling_factor=scale)

    assert torch.autograd.gradcheck(through, (grad, logits))


def test_scores_that_are_all_zero_give_no_gradient() -> None:
    """Sigmoids that underflow: their sum is the floor alone."""
    logits = torch.full((2, 4), -200.0, requires_grad=True)
    weights, _ = topk_routing(logits, 2, scores="sigmoid")
    (gradient,) = torch.autograd.grad(weights.sum(), logits)
    assert RENORMALIZE_FLOOR > 0
    assert gradient.isfinite().all()


def test_what_is_kept_is_the_logits_and_the_choice() -> None:
    logits = logits_of()
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _, ids = topk_routing(logits, 2)
    assert [(tuple(each.shape), each.dtype) for each in packed] == [
        ((7, 9), torch.float32),
        ((7, 2), torch.int32),
    ]
    assert not ids.requires_grad


def by_columns(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, laid out in memory the other way round."""
    dimensions = range(tensor.dim() - 1, -1, -1)
    return torch.empty(tensor.shape[::-1], dtype=tensor.dtype).permute(*dimensions).copy_(tensor)


@pytest.mark.parametrize("with_losses", [False, True])
def test_what_hooks_restore_may_have_other_strides(with_losses: bool) -> None:
    logits = logits_of()

    def gradient() -> torch.Tensor:
        weights, _, *losses = topk_routing_with_losses(logits, 3) if with_losses else topk_routing(logits, 3)
        total = weights.square().sum() + sum(each.load_balancing + each.z for each in losses)
        return torch.autograd.grad(total, logits)[0]

    with torch.autograd.graph.saved_tensors_hooks(by_columns, lambda tensor: tensor):
        turned = gradient()
    assert torch.equal(turned, gradient())


@pytest.mark.parametrize("with_losses", [False, True])
def test_several_gradients_at_a_time(with_losses: bool) -> None:
    logits, incoming = logits_of(), torch.randn(3, 7, 2)
    weights = topk_routing_with_losses(logits, 2)[0] if with_losses else topk_routing(logits, 2)[0]
    (together,) = torch.autograd.grad(weights, logits, incoming, is_grads_batched=True, retain_graph=True)
    for one, given in zip(together, incoming, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(weights, logits, given, retain_graph=True)[0])


def test_the_operator_passes_all_checks_with_gradients() -> None:
    torch.library.opcheck(TOPK_ROUTING, (logits_of(5, 8), 3, "sigmoid", True, torch.randn(8), 2.5))


def test_a_router_trains_through_the_experts_compiled_as_in_eager_code() -> None:
    router = torch.randn(6, 32, requires_grad=True)
    w13, w2 = torch.randn(6, 96, 32) * 0.1, torch.randn(6, 32, 48) * 0.1
    x = torch.randn(11, 32)

    def layer(router: torch.Tensor) -> torch.Tensor:
        weights, ids = topk_routing(x @ router.t(), 2)
        return fused_moe(x, w13, w2, weights, ids).square().mean()

    (eager,) = torch.autograd.grad(layer(router), router)
    assert eager.abs().max() > 0
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    (graph,) = torch.autograd.grad(compiled(router), router)
    torch.testing.assert_close(graph, eager)


def test_transforms() -> None:
    logits = logits_of().detach()

    def loss(row: torch.Tensor) -> torch.Tensor:
        return topk_routing(row[None], 2, renormalize=False)[0].square().sum()

    each = torch.func.vmap(torch.func.grad(loss))(logits)
    for index in range(len(logits)):
        torch.testing.assert_close(each[index], torch.func.grad(loss)(logits[index]))
