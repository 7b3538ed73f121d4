"""The operators on a GPU: PyTorch's checks, CUDA graphs, Inductor's ``reduce-overhead``, captured training steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from flashmoe_science import flash_attention, fused_moe, operators, topk_routing

pytestmark = pytest.mark.gpu

FORWARD = operators.attention.FORWARD
BACKWARD = operators.attention.BACKWARD


def attention_tensors(
    seqlen: int = 200, requires_grad: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Any:
    generator = torch.Generator("cuda").manual_seed(seqlen)
    shapes = (2, 8, seqlen, 64), (2, 2, seqlen, 64), (2, 2, seqlen, 64)
    return [
        torch.randn(*shape, device="cuda", dtype=dtype, generator=generator).requires_grad_(requires_grad)
        for shape in shapes
    ]


def experts(tokens: int = 64) -> Any:
    generator = torch.Generator("cuda").manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator) / 16

    return normal(tokens, 256), normal(8, 2 * 128, 256), normal(8, 256, 128), normal(tokens, 8).float()


def layer(hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    weights, ids = topk_routing(logits, 2)
    return fused_moe(hidden * 2, w13, w2, weights, ids) + 1


def loss(*tensors: torch.Tensor) -> torch.Tensor:
    out, lse = flash_attention(tensors[0] * 1, *tensors[1:], causal=True, return_lse=True)
    return out.float().square().mean() + lse.mean()


def test_a_call_like_the_last_one_is_recorded() -> None:
    tensors = attention_tensors()
    flash_attention(*tensors)
    flash_attention(*tensors)
    graph = make_fx(lambda *each: flash_attention(*each), tracing_mode="real")(*tensors)
    assert "flashmoe_science" in graph.code
    others = [tensor.flip(0) for tensor in tensors]
    assert torch.equal(graph(*others), flash_attention(*others))


def test_attention_passes_all_checks() -> None:
    opcheck(FORWARD, (*attention_tensors(requires_grad=True), True))
    query, key, value = attention_tensors()
    # Rows whose strides are no multiple of 16 bytes give contiguous results.
    odd = torch.randn(2, 8, 20, 3, 24, device="cuda", dtype=torch.float16).unbind(3)
    strided = torch.randn(2, 20, 3, 8, 64, device="cuda", dtype=torch.float16).unbind(2)
    rows_first = [each.transpose(1, 2) for each in strided]
    for tensors in ((query, key, value), odd, rows_first):
        out, lse = FORWARD(*tensors)
        opcheck(FORWARD, tuple(tensors))
        opcheck(BACKWARD, (torch.ones_like(out), *tensors, out, lse, None, False, None, (True, False, True)))


def test_experts_pass_all_checks() -> None:
    hidden, w13, w2, logits = experts()
    opcheck(operators.routing.TOPK_ROUTING, (logits, 2))
    opcheck(operators.moe.FUSED_MOE, (hidden, w13, w2, *topk_routing(logits, 2)))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training(mode: str) -> None:
    compiled = torch.compile(loss, fullgraph=True, mode=mode)
    for seed in range(4):
        torch.manual_seed(seed)
        tensors = attention_tensors(requires_grad=True)
        expected = torch.autograd.grad(loss(*tensors), tensors)
        torch.compiler.cudagraph_mark_step_begin()
        gradients = torch.autograd.grad(compiled(*tensors), tensors)
        for mine, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_compiled_experts_as_cuda_graphs(tokens: int) -> None:
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    hidden, w13, w2, logits = experts(tokens)
    for step in range(4):
        changed = hidden + step / 8
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            torch.testing.assert_close(
                compiled(changed, w13, w2, logits), layer(changed, w13, w2, logits), rtol=2e-2, atol=2e-2
            )


def test_dynamic_shapes() -> None:
    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for seqlen in (128, 200, 513):
        tensors = attention_tensors(seqlen, requires_grad=True)
        expected = torch.autograd.grad(loss(*tensors), tensors)
        for mine, theirs in zip(torch.autograd.grad(compiled(*tensors), tensors), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=1e-5)


def test_operators_in_a_cuda_graph() -> None:
    query, key, value = attention_tensors()
    expected = FORWARD(query, key, value, True)  # and compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = FORWARD(query, key, value, True)
    for result in results:
        result.zero_()
    graph.replay()
    for result, each in zip(results, expected, strict=True):
        assert torch.equal(result, each)


def test_make_graphed_callables_captures_forward_and_backward() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(512, 3 * 512, device="cuda", dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.project(x).view(*x.shape[:2], 3, 8, 64).permute(2, 0, 3, 1, 4)
            out = flash_attention(*heads.unbind(), causal=True)
            assert isinstance(out, torch.Tensor)
            return out.transpose(1, 2).reshape(x.shape)

    torch.manual_seed(0)
    model = Attention()
    data = torch.randn(2, 128, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    expected = torch.autograd.grad(model(data).float().square().mean(), [data, *model.parameters()])
    graphed = torch.cuda.make_graphed_callables(model, (data.detach().clone().requires_grad_(),))
    for _ in range(2):
        gradients = torch.autograd.grad(graphed(data).float().square().mean(), [data, *model.parameters()])
        for mine, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=1e-5)


def test_autocast_with_two_dtypes_and_the_same_shapes() -> None:
    """A call that is recognised as like the last one must not keep the last one's dtype."""
    tensors = attention_tensors()
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float16, torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype):
            out = flash_attention(*tensors)
        assert isinstance(out, torch.Tensor)
        assert out.dtype == dtype
    assert flash_attention(*tensors).dtype == torch.bfloat16  # type: ignore[union-attr]
