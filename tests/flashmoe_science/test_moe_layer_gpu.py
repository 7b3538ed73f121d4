"""The module trained on a GPU: every kind of layer, compiled, under autocast, checkpointed, and in a captured graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_blocks import BLOCKS
from torch.utils.checkpoint import checkpoint

from flashmoe_science import MoE, topk_routing

pytestmark = pytest.mark.gpu
SIZES = {"hidden": 64, "intermediate": 96, "experts": 6, "top_k": 2}
TOKENS = 96
BF16 = torch.bfloat16
Tensors = tuple[torch.Tensor, ...]


def layer_of(name: str, **options: Any) -> MoE:
    """In float32 on the CPU, of weights that are numbers of bfloat16."""
    torch.manual_seed(0)
    layer = MoE(**SIZES, **BLOCKS[name][3], initializer_range=0.25, **options)
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.is_floating_point():
            tensor.data = (tensor + 0.1 * torch.randn_like(tensor)).detach().to(BF16).float()
    return layer


def on_gpu(layer: MoE, dtype: torch.dtype = BF16) -> MoE:
    return copy.deepcopy(layer).to("cuda", dtype)


def chosen(layer: MoE, tokens: torch.Tensor) -> torch.Tensor:
    ids = topk_routing(layer._logits(tokens), layer.top_k, **layer._routing())[1]
    return ids.sort(dim=1).values.cpu()


def tokens_of(*layers: tuple[MoE, str, torch.dtype]) -> torch.Tensor:
    """Tokens whose experts all of the layers choose alike: a rounded logit may prefer another one."""
    tokens = torch.randn(TOKENS, SIZES["hidden"], generator=torch.Generator().manual_seed(1)).to(BF16)
    ids = [chosen(layer, tokens.to(device, dtype)) for layer, device, dtype in layers]
    alike = torch.stack([(each == ids[0]).all(dim=1) for each in ids]).all(dim=0)
    assert alike.sum() > TOKENS // 2
    return tokens[alike]


def gradients(layer: MoE, tokens: torch.Tensor, call: Callable[..., Any] | None = None) -> Tensors:
    """Of the tokens and of all weights."""
    leaf = tokens.detach().requires_grad_()
    output = (call or layer)(leaf)
    incoming = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
    return torch.autograd.grad(output, (leaf, *layer.parameters()), incoming)


def off(results: Tensors, exact: Tensors) -> list[float]:
    """The distance of each, over its length."""
    return [
        float((one.detach().cpu().double() - other.double()).norm() / other.double().norm())
        for one, other in zip(results, exact, strict=True)
    ]


def assert_as_exact(results: Tensors, exact: Tensors, others: Tensors) -> None:
    """At most twice as far off as the CPU's of the same dtype, and a rounding more."""
    for ours, theirs in zip(off(results, exact), off(others, exact), strict=True):
        assert ours <= 2 * theirs + torch.finfo(BF16).eps


@pytest.mark.parametrize("name", BLOCKS)
def test_every_kind_of_layer_trains(name: str) -> None:
    layer = layer_of(name)
    rounded, ours = copy.deepcopy(layer).to(BF16), on_gpu(layer)
    tokens = tokens_of((layer, "cpu", torch.float32), (rounded, "cpu", BF16), (ours, "cuda", BF16))
    exact = gradients(layer, tokens.float())
    results = gradients(ours, tokens.cuda())
    assert_as_exact(results, exact, gradients(rounded, tokens))
    assert all(map(torch.equal, gradients(ours, tokens.cuda()), results))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_checkpoint_has_the_same_bits(recompute: bool) -> None:
    layer = on_gpu(layer_of("qwen3_moe", recompute=recompute))
    tokens = torch.randn(TOKENS, SIZES["hidden"], device="cuda", dtype=BF16)
    plain = gradients(layer, tokens)
    again = gradients(layer, tokens, lambda leaf: checkpoint(layer, leaf, use_reentrant=False))
    assert all(map(torch.equal, plain, again))


def test_autocast_of_weights_in_float32() -> None:
    layer = layer_of("mixtral")
    ours, rounded = on_gpu(layer, torch.float32), on_gpu(layer)
    tokens = tokens_of((layer, "cpu", torch.float32), (rounded, "cuda", BF16))

    def cast(leaf: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", BF16):
            output: torch.Tensor = ours(leaf)
        assert output.dtype is BF16
        return output

    results = gradients(ours, tokens.float().cuda(), cast)
    assert all(each.dtype is torch.float32 for each in results)
    exact = gradients(layer, tokens.float())
    assert_as_exact(results, exact, gradients(rounded, tokens.cuda()))


def test_compiled_without_a_graph_break() -> None:
    layer = on_gpu(layer_of("gpt_oss"))
    tokens = torch.randn(TOKENS, SIZES["hidden"], device="cuda", dtype=BF16)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    for one, other in zip(gradients(layer, tokens, compiled), gradients(layer, tokens), strict=True):
        assert (one - other).float().norm() <= 2 * torch.finfo(BF16).eps * other.float().norm()


def test_a_captured_step_has_the_same_bits() -> None:
    layer = on_gpu(layer_of("deepseek_v3"))
    leaf = torch.randn(TOKENS, SIZES["hidden"], device="cuda", dtype=BF16).requires_grad_()
    incoming = torch.randn_like(leaf)
    wanted = (leaf, *layer.parameters())

    def step() -> Tensors:
        return torch.autograd.grad(layer(leaf), wanted, incoming)

    expected = step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        for each in captured:
            each.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, expected))
