"""`attention_varlen` by the Hopper kernel for prompts beside decode steps on a GPU: pages, graphs, equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from varlen_cases import Shape, bounds, forget_calls, packed, paged, to
from varlen_gpu import attend, check
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.varlen.select import OVERRIDE_VARIABLE
from flashmoe_science.cuda.wgmma import why_not_device

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
QUERIES = (1, 700, 2, 0, 1, 8, 70, 9, 1, 3, 300)
KEYS = (3000, 900, 3, 40, 0, 9000, 70, 20, 1, 0, 5000)


@pytest.fixture(autouse=True)
def by_this_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = why_not_device(device_of(torch.cuda.current_device()))
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv(OVERRIDE_VARIABLE, "mixed_hopper")
    forget_calls(monkeypatch)  # those of tests of another kernel


@pytest.mark.parametrize("page_size", [0, 16, 48, 64, 256])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_pages(page_size: int, dtype: torch.dtype) -> None:
    shape = Shape(QUERIES, KEYS, 8, 2, 128, dtype=dtype)
    call = paged(shape, page_size, spare_rows=3) if page_size else packed(shape, spare_rows=3)
    check(call, shape)


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"), [(64, 8, 2), (128, 32, 8), (64, 3, 3), (128, 64, 1)]
)
def test_dims_and_heads(head_dim: int, heads: int, kv_heads: int) -> None:
    shape = Shape(QUERIES, KEYS, heads, kv_heads, head_dim, dtype=BF16)
    check(paged(shape, 16), shape)


@pytest.mark.parametrize(
    "options", [{"causal": False}, {"window": (100, 0)}, {"softcap": 3.0}, {"chunk": 512}], ids=str
)
def test_options(options: dict[str, Any]) -> None:
    shape = Shape(QUERIES, KEYS, 8, 2, 64, dtype=BF16)
    check(paged(shape, 16), shape, **options)


def test_of_one_kind() -> None:
    for queries in ((1, 2, 8, 1), (90, 64, 9, 300), (0, 0, 0, 0)):
        shape = Shape(queries, (3000, 200, 64, 900), 8, 2, 128, dtype=BF16)
        check(paged(shape, 16, spare_rows=2), shape)


def test_a_thousand_repetitions_give_the_same_bits() -> None:
    shape = Shape((512, *(1,) * 64), (2048,) * 65, 32, 8, 128, dtype=BF16)
    call, given = to(paged(shape, 64), "cuda"), bounds(shape)
    first, _ = attend(call, **given)
    assert all(torch.equal(attend(call, **given)[0], first) for _ in range(1000))


def test_beside_decode_steps_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a workspace and counters, and a decode step may start before its predecessor has ended."""
    shapes = (
        Shape(QUERIES, KEYS, 32, 8, 128, dtype=BF16),
        Shape((1,) * 5, (20000, 1, 0, 129, 700), 32, 8, 128, dtype=BF16),
    )
    calls = [(to(paged(shape, 64, seed), "cuda"), bounds(shape)) for seed, shape in enumerate(shapes)]
    mixed = attend(calls[0][0], **calls[0][1])
    monkeypatch.setenv(OVERRIDE_VARIABLE, "decode_hopper")
    decoded = attend(calls[1][0], **calls[1][1])
    torch.cuda.synchronize()
    results = [attend(call, **given) for _ in range(50) for call, given in calls]
    torch.cuda.synchronize()
    for number, result in enumerate(results):
        assert all(map(torch.equal, result, decoded if number % 2 else mixed))


def test_a_graph_is_replayed_after_lengths_changed() -> None:
    shape = Shape((200, *(2,) * 7), (900,) * 8, 32, 8, 128, dtype=BF16)
    host = paged(shape, 16)
    call, given = to(host, "cuda"), bounds(shape)
    attend(call, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(call, **given)
    for keys in ((900,) * 8, (200, 2, 16, 17, 300, 899, 5, 64)):
        now = torch.tensor(keys, dtype=torch.int32)
        call["seqused_k"].copy_(now)
        graph.replay()
        eager, eager_lse = attend(call, **given)
        assert torch.equal(out, eager)
        assert torch.equal(lse, eager_lse)
        assert_as_exact_as_pytorch(out, lse, {**host, "seqused_k": now}, **given)
