"""torch.compile without a graph break: attention and experts in one graph, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_reference import make_moe

from flashmoe_science import InputError, flash_attention, fused_moe, topk_routing

Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


def attention_inputs(seqlen: int = 40, requires_grad: bool = True) -> Tensors:
    generator = torch.Generator().manual_seed(seqlen)
    shapes = (2, 4, seqlen, 32), (2, 2, seqlen + 10, 32), (2, 2, seqlen + 10, 32)
    return tuple(torch.randn(*shape, generator=generator).requires_grad_(requires_grad) for shape in shapes)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    out, lse = flash_attention(query * 2, key, value, causal=True, return_lse=True)
    return (out + 1).square().sum() + lse.sum()


def same(one: Tensors, other: Tensors) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("dynamic", [False, True, None], ids=["static", "dynamic", "automatic"])
def test_attention_and_its_gradients_in_one_graph(dynamic: bool | None) -> None:
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for seqlen in (40, 41, 56):
        tensors = attention_inputs(seqlen)
        expected = torch.autograd.grad(attention(*tensors), tensors)
        assert same(torch.autograd.grad(compiled(*tensors), tensors), expected)


def graphs_of(function: Callable[..., Any], calls: list[Tensors]) -> int:
    """How many are made for calls of different sizes."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tensors in calls:
            compiled(*tensors)
    return len(graphs)


def test_one_graph_serves_all_lengths() -> None:
    assert graphs_of(attention, [attention_inputs(seqlen) for seqlen in (40, 41, 48, 130)]) == 1


def test_one_graph_serves_any_number_of_tokens() -> None:
    def layer(logits: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return fused_moe(*tensors, *topk_routing(logits, 2))

    calls = [
        (torch.randn(tokens, 4), *make_moe(tokens, 32, 48, 4, 2).tensors[:3]) for tokens in (6, 7, 48, 130)
    ]
    assert graphs_of(layer, calls) == 1


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_experts_in_one_graph(dynamic: bool) -> None:
    def layer(logits: torch.Tensor, hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> Any:
        weights, ids = topk_routing(logits, 2, scores="sigmoid", scaling_factor=1.5)
        return fused_moe(hidden * 1, w13, w2, weights, ids, activation="gelu", w13_layout="interleaved") + 1

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (6, 7, 9):
        moe = make_moe(tokens, 32, 48, 4, 2)
        tensors = torch.randn(tokens, 4), *moe.tensors[:3]
        assert torch.equal(compiled(*tensors), layer(*tensors))


def test_experts_into_a_given_tensor() -> None:
    moe = make_moe(6, 32, 48, 4, 2)

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tensors[0])
        assert fused_moe(*tensors, out=out) is out
        return out

    assert torch.equal(
        torch.compile(layer, backend="aot_eager", fullgraph=True)(*moe.tensors), fused_moe(*moe.tensors)
    )


def test_wrong_arguments_are_named_in_what_the_compiler_raises() -> None:
    compiled = torch.compile(flash_attention, backend="aot_eager", fullgraph=True)
    query, key, value = attention_inputs(requires_grad=False)
    with pytest.raises(Exception, match="query has head_dim 24 but key has 32; expected the same"):
        compiled(query[..., :24], key, value)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_compiled_experts_have_the_gradients_of_eager_ones(recompute: bool, dynamic: bool) -> None:
    def layer(ids: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return fused_moe(*tensors, ids, recompute=recompute)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (6, 9):
        *floats, ids = make_moe(tokens, 32, 48, 4, 2).tensors
        results = []
        for call in (compiled, layer):
            leaves = [tensor.clone().requires_grad_() for tensor in floats]
            results.append(torch.autograd.grad(call(ids, *leaves).square().sum(), leaves))
        assert same(*results)


def test_forward_mode_is_refused_in_what_the_compiler_raises() -> None:
    query, key, value = attention_inputs(requires_grad=False)

    def tangent(query: torch.Tensor) -> Any:
        return torch.func.jvp(lambda query: flash_attention(query, key, value), (query,), (query,))

    with pytest.raises(Exception, match="flash_attention has no forward-mode derivative"):
        torch.compile(tangent, backend="aot_eager", fullgraph=True)(query)


def test_second_derivatives_through_a_transform_are_refused_in_what_the_compiler_raises() -> None:
    query, key, value = attention_inputs(requires_grad=False)

    def first(query: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda query: flash_attention(query, key, value).square().sum())(query).sum()

    with pytest.raises(InputError, match="first derivatives only"):
        torch.func.grad(first)(query)
    with pytest.raises(Exception, match="first derivatives only"):
        torch.compile(torch.func.grad(first), backend="aot_eager", fullgraph=True)(query)


@pytest.mark.slow
def test_inductor() -> None:
    compiled = torch.compile(attention, fullgraph=True)
    for seqlen in (40, 41):
        tensors = attention_inputs(seqlen)
        expected = torch.autograd.grad(attention(*tensors), tensors)
        for mine, theirs in zip(torch.autograd.grad(compiled(*tensors), tensors), expected, strict=True):
            torch.testing.assert_close(mine, theirs)
