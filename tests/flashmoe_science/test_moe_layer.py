"""The module: transformers' blocks are the measure where they are installed."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashmoe_science import InputError, MoE, routing_losses

SIZES = {"hidden": 32, "intermediate": 48, "experts": 6, "top_k": 2}
COMMON = {"hidden_size": 32, "num_experts_per_tok": 2}
BLOCKS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeSparseMoeBlock",
        "Qwen3MoeConfig",
        {"num_experts": 6, "moe_intermediate_size": 48, "norm_topk_prob": True},
        {},
    ),
    "mixtral": (
        "MixtralSparseMoeBlock",
        "MixtralConfig",
        {"num_local_experts": 6, "intermediate_size": 48},
        {},
    ),
    "olmoe": (
        "OlmoeSparseMoeBlock",
        "OlmoeConfig",
        {"num_experts": 6, "intermediate_size": 48, "norm_topk_prob": False},
        {"renormalize": False},
    ),
}


def of_transformers(name: str) -> tuple[Any, MoE]:
    pytest.importorskip("transformers", "5.0", reason="needs transformers 5")
    block_name, configuration, options, ours = BLOCKS[name]
    models = importlib.import_module(f"transformers.models.{name}")
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    torch.manual_seed(0)
    block = getattr(modeling, block_name)(getattr(models, configuration)(**COMMON, **options))
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    layer = MoE(**SIZES, **ours)
    layer.load_state_dict(block.state_dict())
    return block, layer


@pytest.mark.parametrize("name", BLOCKS)
def test_it_loads_the_state_of_transformers_blocks_and_trains_as_they_do(name: str) -> None:
    block, layer = of_transformers(name)
    x = torch.randn(2, 7, 32, requires_grad=True)
    output, right = layer(x), block(x)
    torch.testing.assert_close(output, right, rtol=1e-4, atol=1e-5)
    incoming = torch.randn_like(output)
    ours = torch.autograd.grad(output, (x, *layer.parameters()), incoming)
    theirs = torch.autograd.grad(
        right, (x, *(dict(block.named_parameters())[n] for n, _ in layer.named_parameters())), incoming
    )
    for gradient, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_it_loads_checkpoints_with_a_tensor_for_each_expert(names: tuple[str, str, str]) -> None:
    made = MoE(**SIZES)
    state = {"block.gate.weight": made.gate.weight.detach()}
    gates, ups = made.experts.gate_up_proj.detach().chunk(2, dim=1)
    for part, tensor in zip(names, (gates, ups, made.experts.down_proj.detach()), strict=True):
        for expert in range(6):
            state[f"block.experts.{expert}.{part}.weight"] = tensor[expert]
    other = torch.nn.ModuleDict({"block": MoE(**SIZES)})
    other.load_state_dict(state)
    x = torch.randn(5, 32)
    assert torch.equal(other["block"](x), made(x))
    del state[f"block.experts.3.{names[0]}.weight"]
    with pytest.raises(InputError, match=rf"no block\.experts\.3\.{names[0]}\.weight"):
        torch.nn.ModuleDict({"block": MoE(**SIZES)}).load_state_dict(state)


def test_the_balancing_loss_is_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits = torch.randn(40, 6, requires_grad=True)
    ids = logits.topk(2, dim=-1).indices
    ours = routing_losses(logits, ids)
    theirs = modeling.load_balancing_loss_func((logits,), 6, 2)
    torch.testing.assert_close(ours.load_balancing, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours.load_balancing, logits), torch.autograd.grad(theirs, logits)
    )
    assert torch.equal(ours.tokens_per_expert, torch.bincount(ids.flatten(), minlength=6))


def test_losses_of_an_even_routing_and_of_none() -> None:
    logits = torch.zeros(6, 6, requires_grad=True)
    ids = torch.stack((torch.arange(6), (torch.arange(6) + 1) % 6), dim=1)
    even = routing_losses(logits, ids)
    assert even.load_balancing.item() == pytest.approx(2.0)
    assert even.z.item() == pytest.approx(torch.tensor(6.0).log().square().item())
    none = routing_losses(logits[:0], ids[:0])
    assert (none.load_balancing.item(), none.z.item()) == (0.0, 0.0)
    assert routing_losses(logits, torch.full_like(ids, -1)).tokens_per_expert.sum() == 0


def test_gradients_of_the_losses_by_differences() -> None:
    logits = torch.randn(5, 4, dtype=torch.float64)
    ids = logits.topk(2, dim=-1).indices
    leaf = logits.float().requires_grad_()
    losses = routing_losses(leaf, ids)
    gradient = torch.autograd.grad(losses.load_balancing + losses.z, leaf)[0]
    step = torch.zeros_like(leaf)
    step[2, 1] = 1e-2
    up, down = (routing_losses(leaf.detach() + sign * step, ids) for sign in (1, -1))
    slope = (up.load_balancing + up.z - down.load_balancing - down.z) / 2e-2
    assert gradient[2, 1].item() == pytest.approx(slope.item(), rel=1e-2)


def test_one_graph_with_the_gradients_of_eager_code() -> None:
    torch.manual_seed(1)
    layer = MoE(**SIZES, initializer_range=0.2)
    x = torch.randn(9, 32)

    def loss(call: Any) -> torch.Tensor:
        output, losses = call(x)
        total: torch.Tensor = output.square().mean() + 0.01 * losses.load_balancing + losses.z
        return total

    weights = tuple(layer.parameters())
    eager = torch.autograd.grad(loss(layer.forward_with_losses), weights)
    torch._dynamo.reset()
    compiled = torch.compile(layer.forward_with_losses, backend="aot_eager", fullgraph=True)
    for one, other in zip(torch.autograd.grad(loss(compiled), weights), eager, strict=True):
        torch.testing.assert_close(one, other)


def test_autocast_and_checkpointing() -> None:
    torch.manual_seed(1)
    layer = MoE(**SIZES, recompute=True)
    x = torch.randn(9, 32, requires_grad=True)
    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    again = checkpoint(layer, x, use_reentrant=False)
    assert isinstance(again, torch.Tensor)
    assert torch.equal(torch.autograd.grad(again.sum(), x)[0], expected)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    assert output.dtype is torch.bfloat16
    output.float().sum().backward()
    assert all(
        weight.grad is not None and weight.grad.dtype is torch.float32 for weight in layer.parameters()
    )


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="top_k is 7 with 6 experts; expected 1 to 6"):
        MoE(32, 48, 6, 7)
    with pytest.raises(InputError, match="activation is 'swish'"):
        MoE(32, 48, 6, 2, activation="swish")
