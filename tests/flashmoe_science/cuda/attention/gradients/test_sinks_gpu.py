"""What sinks change of a backward pass, and their gradient, on a GPU: beside PyTorch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashmoe_science import flash_attention
from flashmoe_science.cuda.attention.gradients import sinks as kernel
from flashmoe_science.varlen import sink_gradients
from flashmoe_science.varlen.sink_gradients import WithSinks, with_sinks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
BF16, FP16 = torch.bfloat16, torch.float16
GPT_OSS = 1, 64, 8192, 64


def call_of(shape: tuple[int, int, int, int], dtype: torch.dtype = BF16) -> dict[str, Any]:
    """Every seventh row has no keys."""
    generator = torch.Generator("cuda").manual_seed(sum(shape))

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", generator=generator)

    batch, heads, rows, head_dim = shape
    lse = 3 * normal(batch, heads, rows) + 2
    lse[:, :, 6::7] = -torch.inf
    return {
        "grad_output": normal(batch, rows, heads, head_dim).to(dtype).transpose(1, 2),
        "grad_lse": normal(batch, heads, rows),
        "output": normal(batch, rows, heads, head_dim).to(dtype).transpose(1, 2),
        "lse": lse,
        "sinks": 3 * normal(heads),
    }


def composed(call: dict[str, Any]) -> WithSinks:
    wide = {name: None if each is None else each.double() for name, each in call.items()}
    return sink_gradients._composed(**wide, total=True, of_sinks=True)


def assert_as_composed(call: dict[str, Any], results: WithSinks) -> None:
    """In float64."""
    assert results.total is not None
    assert results.grad_sinks is not None
    right = composed(call)
    torch.testing.assert_close(results.total.double(), right.total, rtol=1e-6, atol=4e-6)
    if call["grad_lse"] is not None:
        assert results.grad_lse is not None
        torch.testing.assert_close(results.grad_lse.double(), right.grad_lse, rtol=3e-5, atol=1e-30)
    products = (call["output"].double() * call["grad_output"].double()).abs().sum(-1)
    share = (call["sinks"].double()[:, None] - right.total).exp().masked_fill(call["lse"].isinf(), 0)  # type: ignore[operator]
    bound = 3e-5 * (products * share).sum((0, 2))
    assert ((results.grad_sinks.double() - right.grad_sinks).abs() <= bound).all()  # type: ignore[operator]


def same_bits(one: WithSinks, other: WithSinks) -> bool:
    return all(
        torch.equal(mine, same)
        for mine, same in zip(one[1:], other[1:], strict=True)
        if mine is not None and same is not None
    )


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 72, 128, 200, 256])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (2, 4, 150), (3, 16, 1024), (1, 1024, 40), (150, 1, 130)], ids=str
)
def test_as_composed(sizes: tuple[int, int, int], head_dim: int, dtype: torch.dtype) -> None:
    call = call_of((*sizes, head_dim), dtype)
    assert_as_composed(call, with_sinks(**call, total=True, of_sinks=True))


@pytest.mark.parametrize("layout", ["expanded", "expanded rows", "every second element", "one element on"])
def test_gradients_of_any_strides(layout: str) -> None:
    call = call_of((2, 4, 150, 64))
    call["grad_output"] = {
        "expanded": lambda: torch.tensor(1.5, device="cuda", dtype=BF16).expand(2, 4, 150, 64),
        "expanded rows": lambda: torch.randn(2, 4, 1, 64, device="cuda").to(BF16).expand(2, 4, 150, 64),
        "every second element": lambda: torch.randn(2, 4, 150, 128, device="cuda").to(BF16)[..., ::2],
        "one element on": lambda: torch.randn(76801, device="cuda").to(BF16)[1:].view(2, 4, 150, 64),
    }[layout]()
    call["grad_lse"] = call["grad_lse"][:, :, :1].expand(2, 4, 150)
    assert_as_composed(call, with_sinks(**call, total=True, of_sinks=True))


@pytest.mark.parametrize(("total", "of_sinks"), [(True, False), (False, True)])
def test_only_what_is_wanted(total: bool, of_sinks: bool) -> None:
    call = call_of((2, 4, 150, 64))
    results = with_sinks(**call, total=total, of_sinks=of_sinks)
    assert [each is not None for each in results[1:]] == [total, total, of_sinks]
    assert same_bits(results, with_sinks(**call, total=True, of_sinks=True))


@pytest.mark.parametrize("shape", [GPT_OSS, (4, 32, 500, 128)], ids=str)
def test_the_same_bits_in_every_call(shape: tuple[int, int, int, int]) -> None:
    call = call_of(shape)
    first = with_sinks(**call, total=True, of_sinks=True)
    assert_as_composed(call, first)
    for _ in range(30):
        assert same_bits(first, with_sinks(**call, total=True, of_sinks=True))


def test_streams_side_by_side() -> None:
    """Each has counters of its own."""
    calls = [call_of((2, 8, 700 + 50 * index, 64)) for index in range(3)]
    expected = [with_sinks(**call, total=True, of_sinks=True) for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    made: list[list[WithSinks]] = [[] for _ in calls]
    for _ in range(20):
        for call, stream, results in zip(calls, streams, made, strict=True):
            with torch.cuda.stream(stream):
                results.append(with_sinks(**call, total=True, of_sinks=True))
    torch.cuda.synchronize()
    for right, results in zip(expected, made, strict=True):
        assert all(same_bits(right, each) for each in results)


def test_a_graph() -> None:
    """Replayed on other values, and on another stream beside calls that are not captured."""
    call, other = call_of((2, 8, 700, 64)), call_of((2, 8, 700, 64))
    other["output"] = other["output"] * 2
    other["sinks"] = other["sinks"] - 1
    expected = [with_sinks(**each, total=True, of_sinks=True) for each in (call, other)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = with_sinks(**call, total=True, of_sinks=True)
        second = with_sinks(**call, total=True, of_sinks=True)
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(first, expected[0])
    assert same_bits(second, expected[0])
    for name in ("output", "sinks"):
        call[name].copy_(other[name])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        with torch.cuda.stream(side):
            graph.replay()
        assert same_bits(with_sinks(**other, total=True, of_sinks=True), expected[1])
    torch.cuda.synchronize()
    assert same_bits(first, expected[1])
    assert same_bits(second, expected[1])


def gradients_of(shape: tuple[int, int, int, int, int], options: dict[str, Any]) -> list[torch.Tensor]:
    batch, heads, kv_heads, rows, head_dim = shape
    generator = torch.Generator("cuda").manual_seed(rows)

    def leaf(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", generator=generator)

    query, grad_output = (leaf(batch, heads, rows, head_dim).to(BF16) for _ in range(2))
    key, value = (leaf(batch, kv_heads, rows, head_dim).to(BF16) for _ in range(2))
    leaves = [each.requires_grad_() for each in (query, key, value, leaf(heads))]
    output, lse = flash_attention(*leaves[:3], sinks=leaves[3], return_lse=True, **options)
    return list(torch.autograd.grad((output, lse), leaves, (grad_output, 0.1 * torch.ones_like(lse))))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((160, 2, 2, 128, 64), {}),
        ((1, 8, 2, 1000, 64), {"causal": True, "window": (128, 0)}),
        ((1, 8, 2, 1000, 128), {"causal": True}),
        ((1, 8, 2, 500, 256), {"causal": True}),
        ((1, 4, 2, 500, 64), {"causal": True, "softcap": 20.0}),
    ],
    ids=str,
)
def test_whole_backward_passes_are_those_of_what_is_composed(
    shape: tuple[int, int, int, int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the kernels for short sequences, of one pass, of two, and the portable ones."""
    mine = gradients_of(shape, options)
    assert all(torch.equal(*pair) for pair in zip(mine, gradients_of(shape, options), strict=True))
    monkeypatch.setattr(kernel, "takes", lambda output: False)
    for one, other in zip(mine, gradients_of(shape, options), strict=True):
        # A weight may be rounded to the neighbour where its exponent differs in the last bits.
        torch.testing.assert_close(
            one.float(), other.float(), rtol=2**-7, atol=2e-3 * float(other.abs().max())
        )


def test_a_graph_of_a_whole_backward_pass() -> None:
    shape, options = (1, 8, 2, 1000, 64), {"causal": True, "window": (128, 0)}
    batch, heads, kv_heads, rows, head_dim = shape
    query = torch.randn(batch, heads, rows, head_dim, device="cuda", dtype=BF16, requires_grad=True)
    key, value = (
        torch.randn(batch, kv_heads, rows, head_dim, device="cuda", dtype=BF16, requires_grad=True)
        for _ in range(2)
    )
    sinks = torch.randn(heads, device="cuda", requires_grad=True)
    grad_output = torch.randn(batch, heads, rows, head_dim, device="cuda", dtype=BF16)

    def step() -> tuple[torch.Tensor, ...]:
        output = flash_attention(query, key, value, sinks=sinks, **options)  # type: ignore[arg-type]
        return torch.autograd.grad(output, (query, key, value, sinks), grad_output)  # type: ignore[arg-type]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip(captured, expected, strict=True))


def test_more_heads_than_it_takes_are_composed() -> None:
    call = call_of((1, 1025, 3, 64))
    assert not kernel.takes(call["output"])
    assert_as_composed(call, with_sinks(**call, total=True, of_sinks=True))
