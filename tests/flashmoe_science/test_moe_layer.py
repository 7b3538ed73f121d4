"""The module: transformers' blocks are the measure where they are installed."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashmoe_science import (
    InputError,
    MoE,
    limit_to_capacity,
    routing_losses,
    tokens_per_expert,
    topk_routing,
)

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
    "gpt_oss": (
        "GptOssMLP",
        "GptOssConfig",
        {"num_local_experts": 6, "intermediate_size": 48},
        {"activation": "swigluoai", "w13_layout": "interleaved", "router_bias": True, "bias": True},
    ),
    "deepseek_v3": (
        "DeepseekV3MoE",
        "DeepseekV3Config",
        {
            "n_routed_experts": 6,
            "num_local_experts": 6,
            "moe_intermediate_size": 48,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        {
            "scores": "sigmoid",
            "correction_bias": True,
            "scaling_factor": 2.5,
            "groups": 3,
            "top_groups": 2,
            "shared_experts": 2,
        },
    ),
}
"""Block, configuration, its options, and ours."""


def of_transformers(name: str) -> tuple[Any, MoE]:
    pytest.importorskip("transformers", "5.0", reason="needs transformers 5")
    block_name, configuration, options, ours = BLOCKS[name]
    models = importlib.import_module(f"transformers.models.{name}")
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    torch.manual_seed(0)
    block = getattr(modeling, block_name)(getattr(models, configuration)(**COMMON, **options))
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    for buffer in block.buffers():  # the correction of the choice
        buffer.copy_(torch.randn(buffer.shape) / 4)
    layer = MoE(**SIZES, **ours)
    layer.load_state_dict(block.state_dict())
    return block, layer


@pytest.mark.parametrize("name", BLOCKS)
def test_it_loads_the_state_of_transformers_blocks_and_trains_as_they_do(name: str) -> None:
    block, layer = of_transformers(name)
    x = torch.randn(2, 7, 32, requires_grad=True)
    output, right = layer(x), block(x)
    right = right[0] if isinstance(right, tuple) else right
    torch.testing.assert_close(output, right, rtol=1e-4, atol=1e-4)
    incoming = torch.randn_like(output)
    (ours, *of_ours) = torch.autograd.grad(output, (x, *layer.parameters()), incoming)
    (theirs, *of_theirs) = torch.autograd.grad(right, (x, *block.parameters()), incoming)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    # Their gradients, called as their parameters, go the way that their state goes.
    expected = MoE(**SIZES, **BLOCKS[name][3])
    state = {key: grad for (key, _), grad in zip(block.named_parameters(), of_theirs, strict=True)}
    expected.load_state_dict({**dict(block.named_buffers()), **state})
    for gradient, wanted in zip(of_ours, expected.parameters(), strict=True):
        torch.testing.assert_close(gradient, wanted.detach(), rtol=1e-4, atol=1e-4)


def test_slots_beyond_the_capacity_are_dropped() -> None:
    ids = torch.tensor([[0, 1], [0, 2], [1, 0], [0, -1], [3, 9]], dtype=torch.int32)
    kept = limit_to_capacity(ids, 4, 2)
    assert kept.tolist() == [[0, 1], [0, 2], [1, -1], [-1, -1], [3, 9]]
    assert tokens_per_expert(kept, 4).tolist() == [2, 2, 1, 1]
    assert (limit_to_capacity(ids, 4, 0)[ids < 4] == -1).all()
    with pytest.raises(InputError, match="capacity is -1; expected 0 or more"):
        limit_to_capacity(ids, 4, -1)


def test_a_layer_with_a_capacity_keeps_its_shared_expert() -> None:
    torch.manual_seed(0)
    layer = MoE(**SIZES, capacity_factor=0.5, shared_experts=1, initializer_range=0.2)
    x = torch.randn(30, 32)
    output, losses = layer.forward_with_losses(x)
    assert losses.tokens_per_expert.max() <= 5  # half of 60 / 6
    gate, up = layer.experts.gate_up_proj[6].chunk(2)
    shared = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ layer.experts.down_proj[6].T
    ids = layer._within_capacity(topk_routing(layer._logits(x), 2)[1])
    alone = (ids < 0).all(dim=1)
    assert alone.any()
    torch.testing.assert_close(output[alone], shared[alone], rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="capacity_factor is 0; expected a number above 0"):
        MoE(**SIZES, capacity_factor=0)


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
