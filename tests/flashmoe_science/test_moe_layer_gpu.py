"""The module trained on a GPU: gradients against the formula in float64, with the errors of PyTorch's own 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_blocks import BLOCKS, options_of
from moe_reference import ACTIVATIONS, factor_of
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flashmoe_science import MoE, topk_routing
from flashmoe_science.moe_arguments import RENORMALIZE_FLOOR, Activation, W13Layout
from flashmoe_science.moe_composition import split_projections

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs sm_80"
    ),
]

DEVICE = "cuda"
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
TOKENS, HIDDEN = 300, 256
SIZES = {"hidden": HIDDEN, "intermediate": 128, "experts": 6, "top_k": 2}
Tensors = tuple[torch.Tensor, ...]


def made(name: str, dtype: torch.dtype = BF16, **more: Any) -> MoE:
    """A layer of a kind of block, with projections of about 1 and no bias of 0."""
    torch.manual_seed(0)
    layer = MoE(**SIZES, **options_of(name), **more, initializer_range=0.06, device=DEVICE)
    for each, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if each.endswith("bias"):
            torch.nn.init.normal_(tensor, std=0.2)
    return layer.to(dtype)


def given(dtype: torch.dtype = BF16, seed: int = 1) -> Tensors:
    """Tokens, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    x, incoming = (torch.randn(TOKENS, HIDDEN, generator=generator).to(DEVICE, dtype) for _ in range(2))
    return x.requires_grad_(), incoming


def results(output: torch.Tensor, layer: MoE, x: torch.Tensor, incoming: torch.Tensor) -> Tensors:
    """The output, and the gradients of the tokens and of every parameter."""
    inputs = x, *layer.parameters()
    return output.detach(), *torch.autograd.grad(output, inputs, incoming.to(output.dtype))


def composed(
    layer: MoE, leaves: dict[str, torch.Tensor], x: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The layer's formula in ``dtype`` for a choice that was made; it is weighted and summed in float32 or float64."""
    exact = FP64 if dtype is FP64 else FP32
    tokens, weights = x.to(dtype), {name: leaf.to(dtype) for name, leaf in leaves.items()}
    of_router = dtype if layer.gate.e_score_correction_bias is None else exact
    bias = weights.get("gate.bias")
    logits = functional.linear(
        tokens.to(of_router),
        weights["gate.weight"].to(of_router),
        None if bias is None else bias.to(of_router),
    ).to(exact)
    scores = logits.softmax(dim=1) if layer.scores == "softmax" else logits.sigmoid()
    chosen = scores.gather(1, ids.long())
    if layer.renormalize:
        chosen = chosen / (chosen.sum(dim=1, keepdim=True) + RENORMALIZE_FLOOR)
    chosen, ids = layer._with_shared(chosen * layer.scaling_factor, ids)
    kind, layout = Activation(layer.activation), W13Layout(layer.w13_layout)
    names = "gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"
    result = torch.zeros(x.shape, dtype=exact, device=x.device)
    for expert in range(layer.routed_experts + layer.shared_experts):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        parts = (weights.get(f"experts.{each}") for each in names)
        w13, w13_bias, w2, w2_bias = (None if part is None else part[expert] for part in parts)
        gate, up = split_projections(functional.linear(tokens[token], w13, w13_bias), layout)
        rows = functional.linear(ACTIVATIONS[kind](gate) * factor_of(up, kind), w2, w2_bias)
        result = result.index_add(0, token, rows.to(exact) * chosen[token, choice, None])
    return result.to(dtype)


def assert_as_exact_as_torch(ours: Tensors, layer: MoE, x: torch.Tensor, incoming: torch.Tensor) -> None:
    """Errors against float64 at most twice those of PyTorch's operations in bfloat16, and a rounding more.

    Of the worst element and of the RMS, for the output, the gradient of the tokens and that of each parameter.
    """
    with torch.no_grad(), torch.autocast(x.device.type, BF16, enabled=x.dtype is FP32):
        _, ids = topk_routing(layer._logits(x), layer.top_k, **layer._routing())

    def of_torch(dtype: torch.dtype) -> Tensors:
        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to(FP64 if dtype is FP64 else tensor.dtype).requires_grad_()

        leaves, tokens = {name: leaf(each) for name, each in layer.named_parameters()}, leaf(x)
        output = composed(layer, leaves, tokens, ids, dtype)
        inputs = tokens, *leaves.values()
        return output.detach(), *torch.autograd.grad(output, inputs, incoming.to(output.dtype))

    names = "output", "tokens", *(name for name, _ in layer.named_parameters())
    eps = torch.finfo(BF16).eps
    for name, our, true, their in zip(names, ours, of_torch(FP64), of_torch(BF16), strict=True):
        assert our.dtype is their.dtype, name
        assert true.any(), name
        error, bound = our.double() - true, their.double() - true
        assert error.abs().max() <= 2 * bound.abs().max() + 2 * eps * true.abs().max(), name
        rms, of_bound, size = (each.square().mean().sqrt() for each in (error, bound, true))
        assert rms <= 2 * of_bound + eps * size / 2, name


@pytest.mark.parametrize("name", BLOCKS)
def test_every_kind_of_layer_trains(name: str) -> None:
    layer, (x, incoming) = made(name), given()
    ours = results(layer(x), layer, x, incoming)
    assert_as_exact_as_torch(ours, layer, x, incoming)
    assert all(map(torch.equal, ours, results(layer(x), layer, x, incoming)))


def test_a_compiled_layer_trains() -> None:
    """In one graph, with the kernels that torch.compile makes around ours."""
    layer, (x, incoming) = made("deepseek_v3"), given()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    assert_as_exact_as_torch(results(compiled(x), layer, x, incoming), layer, x, incoming)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_parameters_in_float32_under_autocast(name: str) -> None:
    layer, (x, incoming) = made(name, FP32), given(FP32)
    with torch.autocast(DEVICE, BF16):
        output = layer(x)
    assert output.dtype is BF16
    ours = results(output, layer, x, incoming)
    assert all(gradient.dtype is FP32 for gradient in ours[1:])
    assert_as_exact_as_torch(ours, layer, x, incoming)


@pytest.mark.parametrize("recompute", [False, True])
def test_checkpointing_gives_the_same_bits(recompute: bool) -> None:
    layer, (x, incoming) = made("gpt_oss", recompute=recompute), given()
    expected = results(layer(x), layer, x, incoming)
    assert_as_exact_as_torch(expected, layer, x, incoming)
    again = checkpoint(layer, x, use_reentrant=False)
    assert isinstance(again, torch.Tensor)
    assert all(map(torch.equal, results(again, layer, x, incoming), expected))


def test_a_captured_step_trains_as_an_eager_one() -> None:
    """Forward pass with losses, backward pass and optimizer in one graph, replayed with other tokens."""
    captured, eager = made("qwen3_moe"), made("qwen3_moe")
    x, incoming = (tensor.detach() for tensor in given())

    def step(layer: MoE, optimizer: torch.optim.Optimizer) -> None:
        output, losses = layer.forward_with_losses(x)
        loss = (output.float() * incoming).sum() / TOKENS + losses.load_balancing + losses.z
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (captured, eager)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(captured, optimizers[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured, optimizers[0])
    eager.load_state_dict(captured.state_dict())
    for seed in range(3):
        x.copy_(given(seed=seed + 5)[0].detach())
        before = {name: each.detach().clone() for name, each in eager.named_parameters()}
        graph.replay()
        step(eager, optimizers[1])
        for (name, ours), right in zip(captured.named_parameters(), eager.parameters(), strict=True):
            assert ours.grad is not None
            assert right.grad is not None
            # A step is rounded to the parameter's dtype.
            for one, other, least in (
                (ours.grad, right.grad, 1 / 256),
                (ours - before[name], right - before[name], 1 / 16),
            ):
                assert other.any(), name
                assert (one.float() - other.float()).norm() <= least * other.float().norm(), name
