"""Training with the experts: a layer that is split over ranks, and what a model learns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from moe_reference import make_moe
from torch.nn import functional

from flashmoe_science import fused_moe, tokens_per_expert, topk_routing
from flashmoe_science.moe_gradients import MainGradients
from flashmoe_science.routing_composition import topk as composed_topk


@pytest.mark.parametrize("per_rank", [3, 1])
def test_experts_of_a_layer_split_over_ranks_make_the_layer(per_rank: int) -> None:
    """Each rank marks the others' slots by ids that are no experts, and counts its own; outputs and gradients of the
    tokens add up, those of the weights and the counts are the layer's parts. A rank may have fewer experts than a token
    chooses.
    """
    experts = 6
    moe = make_moe(40, 64, 48, experts, 3)
    incoming = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    leaves = [tensor.detach().clone().requires_grad_() for tensor in moe.tensors[:4]]
    whole = fused_moe(*leaves, moe.topk_ids)
    expected = torch.autograd.grad(whole, leaves, incoming)
    counts = tokens_per_expert(moe.topk_ids, experts)
    output, tokens_gradient, weights_gradient = torch.zeros_like(whole), 0.0, 0.0
    for first in range(0, experts, per_rank):
        local = moe.topk_ids - first
        ids = torch.where((local >= 0) & (local < per_rank), local, -1)
        mine = slice(first, first + per_rank)
        x, w13, w2, weights = (
            tensor.detach().clone().requires_grad_()
            for tensor in (moe.hidden_states, moe.w13[mine], moe.w2[mine], moe.topk_weights)
        )
        part = fused_moe(x, w13, w2, weights, ids)
        of_x, of_w13, of_w2, of_weights = torch.autograd.grad(part, (x, w13, w2, weights), incoming)
        output = output + part.detach()
        tokens_gradient, weights_gradient = tokens_gradient + of_x, weights_gradient + of_weights
        assert torch.equal(of_w13, expected[1][mine])
        assert torch.equal(of_w2, expected[2][mine])
        assert torch.equal(tokens_per_expert(ids, per_rank), counts[mine])
        assert not of_weights[ids < 0].any()
    torch.testing.assert_close(output, whole)
    torch.testing.assert_close(tokens_gradient, expected[0])
    assert torch.equal(weights_gradient, expected[3])
    assert counts.sum() == moe.topk_ids.numel()


def test_gradients_of_micro_batches_add_up_in_the_buffers() -> None:
    """As Megatron accumulates: the buffers hold the sum of all steps' gradients, in float32."""
    buffers = MainGradients(torch.zeros(4, 96, 64), torch.zeros(4, 64, 48))
    expected = [torch.zeros_like(buffer) for buffer in buffers if buffer is not None]
    weights = make_moe(1, 64, 48, 4, 2)
    for seed in range(3):
        moe = make_moe(20, 64, 48, 4, 2, seed=seed)
        leaves = [each.detach().clone().requires_grad_() for each in (weights.w13, weights.w2)]
        arguments = moe.hidden_states, *leaves, moe.topk_weights, moe.topk_ids
        gradients = torch.autograd.grad(fused_moe(*arguments).square().sum(), leaves)
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient
        fused_moe(*arguments, main_gradients=tuple(buffers)).square().sum().backward()
        assert all(leaf.grad is None for leaf in leaves)
    for buffer, total in zip(buffers, expected, strict=True):
        assert buffer is not None
        assert torch.equal(buffer, total)


Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of tokens, the router's weights, w13 and w2."""


def ours(x: torch.Tensor, router: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    weights, ids = topk_routing(x @ router.t(), 2)
    return fused_moe(x, w13, w2, weights, ids)


def composed(x: torch.Tensor, router: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    weights, ids = composed_topk(x @ router.t(), 2)
    result = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(len(w13)):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x[token], w13[expert]).chunk(2, dim=1)
        rows = functional.linear(functional.silu(gate) * up, w2[expert])
        result = result.index_add(0, token, rows.float() * weights[token, choice, None])
    return result.to(x.dtype)


def losses(layer: Layer, dtype: torch.dtype, steps: int) -> torch.Tensor:
    """Of a model of two layers, with its parameters in float32 and its arithmetic in ``dtype``."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, teacher = normal(48, 32), normal(32, 32) * 32**-0.5
    target = torch.tanh(x @ teacher)
    parameters = [
        (normal(*shape) * scale).requires_grad_()
        for _ in range(2)
        for shape, scale in (((4, 32), 0.2), ((4, 64, 32), 32**-0.5), ((4, 32, 32), 32**-0.5))
    ]
    optimizer = torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
    curve = []
    for _ in range(steps):
        optimizer.zero_grad()
        cast = [parameter.to(dtype) for parameter in parameters]
        tokens = x.to(dtype)
        for first in (0, 3):
            tokens = tokens + layer(tokens, *cast[first : first + 3])
        loss = (tokens.float() - target).square().mean()
        loss.backward()
        optimizer.step()
        curve.append(float(loss.detach()))
    return torch.tensor(curve)


@pytest.mark.parametrize("steps", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_a_models_loss_is_that_of_the_composition(steps: int, one_thread: None) -> None:
    """In float32 it is the same curve; in bfloat16 it is no further from that than the composition in bfloat16 is."""
    exact = losses(composed, torch.float32, steps)
    assert exact[-1] < exact[0] / 4
    single = losses(ours, torch.float32, steps)
    theirs, mine = (losses(layer, torch.bfloat16, steps) for layer in (composed, ours))
    spread = (theirs - exact).abs().mean()
    assert (single - exact).abs().mean() < spread
    assert (mine - exact).abs().mean() < 2 * spread
