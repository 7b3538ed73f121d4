"""The module: transformers' blocks are the measure where they are installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_blocks import BLOCKS, COMMON, SIZES, options_of
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from flashmoe_science import (
    InputError,
    MoE,
    limit_to_capacity,
    routing_losses,
    tokens_per_expert,
    topk_routing,
)


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


OWN: dict[str, Any] = {"correction_bias": True, "scores": "sigmoid", "activation": "swigluoai", "bias": True}
BY_TURNS: dict[str, Any] = {**OWN, "w13_layout": "interleaved"}


def test_a_layer_made_without_memory_is_complete_once_it_is_reset() -> None:
    layer = MoE(**SIZES, **BY_TURNS, device="meta").to_empty(device="cpu")
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.data.fill_(123)
    layer.reset_parameters()
    fresh = MoE(**SIZES, **BY_TURNS).state_dict()
    for name, tensor in layer.state_dict().items():
        if ("proj" in name and "bias" not in name) or name == "gate.weight":
            assert 0 < tensor.std() < 0.1, name
        else:
            assert torch.equal(tensor, fresh[name]), name


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("stored", [OWN, BY_TURNS], ids=["parts", "by turns"])
@pytest.mark.parametrize("options", [OWN, BY_TURNS], ids=["parts", "by turns"])
def test_a_layer_made_without_memory_takes_a_loaded_state(
    options: dict[str, Any], stored: dict[str, Any], assign: bool
) -> None:
    state = MoE(**SIZES, **stored).state_dict()
    layer = MoE(**SIZES, **options, device="meta" if assign else "cpu")
    layer.load_state_dict(state, assign=assign)
    moved = layer.to("cpu", torch.float64)
    assert not any(tensor.is_meta for tensor in (*moved.parameters(), *moved.buffers()))
    again = MoE(**SIZES, **stored)
    again.load_state_dict(moved.float().state_dict())
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, state[name]), name


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


def test_the_losses_are_of_the_choice_also_where_a_capacity_drops_slots() -> None:
    torch.manual_seed(0)
    layer = MoE(**SIZES, initializer_range=0.2)
    x = torch.randn(30, 32) + 5 * layer.gate.weight[0].detach()  # everybody chooses expert 0
    weight = layer.gate.weight

    def balance() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        losses = layer.forward_with_losses(x)[1]
        assert losses.z.isfinite()
        (gradient,) = torch.autograd.grad(losses.load_balancing, weight)
        return losses.load_balancing.detach(), gradient, losses.tokens_per_expert

    loss, gradient, chosen = balance()
    layer.capacity_factor = 0.5
    with_capacity, its_gradient, taken = balance()
    assert (chosen[0], taken[0]) == (30, 5)
    assert torch.equal(taken, chosen.clamp(max=5))
    assert loss > 3  # 2 is even, 6 the most
    assert torch.equal(with_capacity, loss)
    assert torch.equal(its_gradient, gradient)


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
    with pytest.raises(InputError, match="expected the same number of tokens"):
        routing_losses(logits, ids[:5])


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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": 40}, "the hidden size is 40; expected a multiple of 16"),
        ({"intermediate": 24}, "the intermediate size is 24; expected a multiple of 16"),
        ({"experts": 0}, "experts is 0; expected a whole number, 1 or more"),
        ({"top_k": 2.0}, "top_k is 2.0; expected a whole number"),
        ({"scores": "tanh"}, "scores is 'tanh'"),
        ({"groups": 4}, "groups is 4 with 6 experts"),
        ({"groups": 2, "top_groups": 3}, "top_groups is 3 of 2 groups"),
        ({"groups": 6, "top_groups": 1}, "k is 2 but 1 of 6 groups have 1 experts"),
        ({"shared_experts": -1}, "shared_experts is -1; expected a whole number, 0 or more"),
        ({"scaling_factor": float("nan")}, "scaling_factor is nan"),
        ({"capacity_factor": float("inf")}, "capacity_factor is inf"),
        ({"capacity_factor": "all"}, "capacity_factor is 'all'"),
        ({"correction_bias": torch.zeros(6)}, "correction_bias is a Tensor; expected True or False"),
        ({"router_bias": "no"}, "router_bias is 'no'; expected True or False"),
        ({"bias": None}, "bias is None; expected True or False"),
        ({"recompute": 1}, "recompute is 1; expected True or False"),
        ({"main_gradients": 1}, "main_gradients is 1; expected True or False"),
        ({"initializer_range": -0.1}, "initializer_range is -0.1; expected a number, 0 or more"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_that_do_not_fit_are_refused_when_the_layer_is_made(
    changed: dict[str, Any], message: str
) -> None:
    options: dict[str, Any] = {**SIZES, **changed}
    with pytest.raises(InputError, match=message):
        MoE(**options)


def test_tokens_that_do_not_fit_are_refused_in_our_words() -> None:
    layer = MoE(**SIZES)
    for tokens, message in (
        (torch.randn(3, 48), r"hidden_states has shape \(3, 48\); expected \(\.\.\., 32\)"),
        (torch.randn(()), r"hidden_states has shape \(\); expected"),
        (
            torch.randn(3, 32).bfloat16(),
            r"hidden_states is torch\.bfloat16 but the experts are torch\.float32",
        ),
        ([1.0], "hidden_states is a list; expected a torch.Tensor"),
    ):
        for call in (layer, layer.forward_with_losses):
            with pytest.raises(InputError, match=message):
                call(tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_that_is_cast_keeps_its_correction_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(MoE(**SIZES, **options_of("deepseek_v3"), initializer_range=0.2))
    correction = layer[0].gate.e_score_correction_bias
    correction.copy_(8 + torch.randn(6) / 1000)  # in 16 bits they would all be alike
    exact = correction.clone()
    layer.to(dtype)
    assert torch.equal(layer[0].gate.e_score_correction_bias, exact)
    x = torch.randn(9, 32, dtype=dtype)
    assert layer(x).dtype is dtype
    state = {name: tensor.to(dtype) for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)  # what a file holds may be 16 bits
    assert layer(x).isfinite().all()


@pytest.mark.parametrize(
    "options",
    [{"shared_experts": 2}, {"capacity_factor": 1.1}, options_of("deepseek_v3"), {"recompute": True}],
    ids=["shared", "capacity", "deepseek_v3", "recompute"],
)
def test_an_exported_layer_takes_any_number_of_tokens(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = MoE(**SIZES, **options, initializer_range=0.2)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(layer, (torch.randn(5, 32),), dynamic_shapes=({0: tokens},))
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for count in (2, 11, 64):
        x = torch.randn(count, 32)
        assert torch.equal(loaded(x), layer(x))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_every_kind_of_layer_compiles_without_a_break(name: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    layer = MoE(**SIZES, **options_of(name), initializer_range=0.2)
    torch._dynamo.reset()
    counter, frames = CompileCounterWithBackend("aot_eager"), set()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=counter)
    for count in (5, 6, 9) if dynamic else (5,):
        x = torch.randn(count, 32, requires_grad=True)
        output, right = compiled(x), layer(x)
        torch.testing.assert_close(output, right)
        inputs, incoming = (x, *layer.parameters()), torch.randn_like(right)
        for one, other in zip(
            torch.autograd.grad(output, inputs, incoming),
            torch.autograd.grad(right, inputs, incoming),
            strict=True,
        ):
            torch.testing.assert_close(one, other)
        frames.add(counter.frame_count)
    assert len(frames) == 1  # other lengths make no further graph


def test_capacities_are_rounded_as_fractions_are() -> None:
    layer = MoE(32, 48, 10, 1, capacity_factor=1.1)
    ids = layer._within_capacity(torch.zeros((100, 1), dtype=torch.int32))
    assert (ids == 0).sum() == 11  # 1.1 * 10 in floating point is a little more than 11
    layer.capacity_factor = 1e-12
    assert (layer._within_capacity(torch.zeros((100, 1), dtype=torch.int32)) == 0).sum() == 1


def of_single_experts(layer: MoE) -> dict[str, torch.Tensor]:
    """A layer with all gates first, as a checkpoint with a tensor for each expert and projection."""
    state = {"gate.weight": layer.gate.weight.detach()}
    gates, ups = layer.experts.gate_up_proj.detach().chunk(2, dim=1)
    parts = {"gate_proj": gates, "up_proj": ups, "down_proj": layer.experts.down_proj.detach()}
    for expert in range(layer.routed_experts):
        for part, tensor in parts.items():
            state[f"experts.{expert}.{part}.weight"] = tensor[expert]
    return state


def test_states_follow_the_order_of_the_layers_rows() -> None:
    """A GPT-OSS block into a layer with all gates first, and a tensor for each expert into one by turns."""
    block, by_turns = of_transformers("gpt_oss")
    x = torch.randn(7, 32)
    concat = MoE(**SIZES, **{**options_of("gpt_oss"), "w13_layout": "concat"})
    concat.load_state_dict(block.state_dict())
    torch.testing.assert_close(concat(x), by_turns(x), rtol=1e-5, atol=1e-6)

    plain = MoE(**SIZES, initializer_range=0.2)
    interleaved = MoE(**SIZES, w13_layout="interleaved")
    interleaved.load_state_dict(of_single_experts(plain))
    torch.testing.assert_close(interleaved(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_block_of_gpt_oss_is_refused_by_a_layer_with_another_activation(activation: str) -> None:
    """Nothing in its tensors shows the difference, so it would compute something else without a word."""
    block, _ = of_transformers("gpt_oss")
    layer = MoE(**SIZES, **{**options_of("gpt_oss"), "activation": activation})
    before = layer.gate.weight.detach().clone()
    message = f"is a GPT-OSS block's; expected activation 'swigluoai', not '{activation}'$"
    with pytest.raises(InputError, match=message):
        layer.load_state_dict(block.state_dict())
    assert torch.equal(layer.gate.weight, before)


def test_fused_tensors_of_transformers_are_put_by_turns() -> None:
    """They are called as the layer's own, whose state has a mark."""
    block, concat = of_transformers("qwen3_moe")
    x = torch.randn(7, 32)
    by_turns = MoE(**SIZES, w13_layout="interleaved")
    by_turns.load_state_dict(block.state_dict())
    torch.testing.assert_close(by_turns(x), concat(x), rtol=1e-5, atol=1e-6)
    assert torch.equal(by_turns.experts.gate_up_proj[:, ::2], concat.experts.gate_up_proj.chunk(2, dim=1)[0])


def test_a_layers_own_state_keeps_its_order_and_goes_into_the_other(tmp_path: Path) -> None:
    by_turns = MoE(**SIZES, w13_layout="interleaved", bias=True, initializer_range=0.2)
    torch.nn.init.normal_(by_turns.experts.gate_up_proj_bias)
    x = torch.randn(7, 32)
    torch.save(dict(by_turns.state_dict()), tmp_path / "state.pt")
    for layout in ("interleaved", "concat"):
        other = MoE(**SIZES, w13_layout=layout, bias=True)
        other.load_state_dict(torch.load(tmp_path / "state.pt"))
        torch.testing.assert_close(other(x), by_turns(x), rtol=1e-5, atol=1e-6)
        again = MoE(**SIZES, w13_layout="interleaved", bias=True)
        again.load_state_dict(other.state_dict())
        assert torch.equal(again.experts.gate_up_proj, by_turns.experts.gate_up_proj)


def test_shared_experts_beside_fused_tensors_are_put_by_turns() -> None:
    block, concat = of_transformers("deepseek_v3")
    by_turns = MoE(**SIZES, **options_of("deepseek_v3"), w13_layout="interleaved")
    by_turns.load_state_dict(block.state_dict())
    x = torch.randn(7, 32)
    torch.testing.assert_close(by_turns(x), concat(x), rtol=1e-5, atol=1e-6)


def test_a_shared_expert_of_another_size_is_named() -> None:
    block, _ = of_transformers("deepseek_v3")
    layer = MoE(**SIZES, **{**options_of("deepseek_v3"), "shared_experts": 1})
    with pytest.raises(InputError, match=r"intermediate size 96; expected .*, 1 \* 48"):
        layer.load_state_dict(block.state_dict())


def test_a_layer_from_the_meta_device_begins_as_a_new_one() -> None:
    """Memory that nobody wrote holds anything, in buffers too, which are no parameters."""
    options = {**options_of("deepseek_v3"), "w13_layout": "interleaved"}
    layer = MoE(**SIZES, **options, device="meta").to_empty(device="cpu")
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.detach().fill_(77)
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    made = MoE(**SIZES, **options).state_dict()
    assert made.keys() == layer.state_dict().keys()
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, made[name]), name


def test_a_layer_on_the_meta_device_takes_the_tensors_of_a_state() -> None:
    """All of them: what stays on the meta device cannot be moved."""
    block, layer = of_transformers("gpt_oss")
    by_turns = {"bias": True, "w13_layout": "interleaved"}
    for state, options in (
        (block.state_dict(), options_of("gpt_oss")),
        (layer.state_dict(), options_of("gpt_oss")),
        (of_single_experts(MoE(**SIZES)), {"w13_layout": "interleaved"}),
        (MoE(**SIZES, **{**by_turns, "w13_layout": "concat"}).state_dict(), by_turns),
    ):
        right = MoE(**SIZES, **options)
        right.load_state_dict(state)
        empty = MoE(**SIZES, **options, device="meta")
        assert not any(empty.load_state_dict(state, assign=True))  # neither missing nor unexpected
        moved = empty.to("cpu", torch.float64).float()
        assert moved.experts.gate_up_rows_by_turns.item() == 1
        x = torch.randn(7, 32)
        assert torch.equal(moved(x), right(x))


def test_main_gradients_of_the_experts_weights_are_added_to() -> None:
    """Over micro-batches; autograd gets those of the other parameters, and of a weight without a buffer."""
    torch.manual_seed(0)
    layer = MoE(**SIZES, bias=True, shared_experts=1, main_gradients=True, initializer_range=0.2)
    plain = MoE(**SIZES, bias=True, shared_experts=1)
    plain.load_state_dict(layer.state_dict())
    weights = layer.experts.gate_up_proj, layer.experts.down_proj
    batches = torch.randn(2, 9, 32)

    def train() -> None:
        for each in (layer, plain):
            each.zero_grad()
            for x in batches:
                each(x).square().sum().backward()

    train()  # no weight has a buffer
    for ours, right in zip(layer.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.equal(ours.grad, right.grad)
    for weight in weights:
        weight.main_grad = torch.ones_like(weight)
    train()
    for (name, ours), right in zip(layer.named_parameters(), plain.parameters(), strict=True):
        if name.endswith("_proj"):
            assert ours.grad is None
            torch.testing.assert_close(ours.main_grad, 1 + right.grad)
        else:
            assert torch.equal(ours.grad, right.grad)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            assert torch.equal(layer(batches), plain(batches))
        with pytest.raises(InputError, match="without autocast"):
            layer(batches)
