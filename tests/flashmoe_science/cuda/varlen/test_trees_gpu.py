"""Trees of draft tokens on a GPU, by each kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tree_cases import FEW, TREES, call_of, chain, random_tree, shape_of, tree_mask
from varlen_cases import Call, Shape, bounds, forget_calls, packed, paged, quantized, to
from varlen_quantized import assert_as_exact_as_ideal
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science import attention_varlen
from flashmoe_science.errors import NoKernelError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BF16 = torch.bfloat16
LONG = Shape((8, 1, 5, 8), (4100, 8193, 64, 20_000), 8, 2, 128, dtype=BF16)
KERNELS = ("decode", "hopper", "portable")
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def by(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_CUDA_VARLEN", kernel)
    forget_calls(monkeypatch)


def on_gpu(call: Call, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Skips where the kernel does not take such calls."""
    there = to(call, "cuda")
    try:
        result = attention_varlen(**there, **given, return_lse=True)  # type: ignore[arg-type]
    except NoKernelError as refusal:
        pytest.skip(str(refusal))
    again = attention_varlen(**there, **given, return_lse=True)  # type: ignore[arg-type]
    assert all(torch.equal(*each) for each in zip(again, result, strict=True))
    return result  # type: ignore[return-value]


@pytest.mark.parametrize("page_size", [0, 1, 16, 64])
@each_kernel
@pytest.mark.parametrize("trees", [*TREES, "long"])
def test_as_exact_as_pytorch(
    trees: str, kernel: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "decode" and trees not in (*FEW, "long"):
        pytest.skip("the decode kernel is for few queries")
    by(kernel, monkeypatch)
    shape, parents = shape_of(trees, head_dim=64) if trees != "long" else (LONG, LONG_TREES)
    call = call_of(shape, parents, page_size)
    more: tuple[dict[str, Any], ...] = ({}, {"causal": False}, {"causal": False, "window": (-1, 2)})
    for options in more if trees == "random" else more[:1]:
        given = {**bounds(shape), **options}
        assert_as_exact_as_pytorch(*on_gpu(call, **given), call, **given)


LONG_TREES = [random_tree(nodes, seed) for seed, nodes in enumerate(LONG.queries)]


@pytest.mark.parametrize("page_size", [16, 1])
@each_kernel
def test_with_everything_else(kernel: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    by(kernel, monkeypatch)
    call = call_of(LONG, LONG_TREES, page_size) | {"sinks": torch.linspace(-2, 3, 8)}
    given = {**bounds(LONG), "softcap": 5.0, "split_keys": 256}
    assert_as_exact_as_pytorch(*on_gpu(call, **given), call, **given)


@each_kernel
@pytest.mark.parametrize("page_size", [0, 16])
def test_a_chain_is_causal(page_size: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by(kernel, monkeypatch)
    call = paged(LONG, page_size) if page_size else packed(LONG)
    mask = tree_mask([chain(nodes) for nodes in LONG.queries])
    for bits, causal in zip(
        on_gpu({**call, "tree_mask": mask}, **bounds(LONG)), on_gpu(call, **bounds(LONG)), strict=True
    ):
        assert torch.equal(bits, causal)


@pytest.mark.parametrize("scales", ["one", "each head", "each key"])
@pytest.mark.parametrize("page_size", [0, 1, 16])
def test_over_a_cache_of_fp8(page_size: int, scales: str) -> None:
    for dim in (
        (64, 128) if page_size != 1 else (64,)
    ):  # eight rows of four heads with pages of 1 are too many at 128
        shape = Shape((8, 1, 5), (300, 5, 65), 8, 2, dim, dtype=BF16)
        call = call_of(
            shape, [random_tree(nodes, seed) for seed, nodes in enumerate(shape.queries)], page_size
        )
        small, wide = quantized(call, scales)
        assert_as_exact_as_ideal(*on_gpu(small, **bounds(shape)), call, wide, **bounds(shape))


@pytest.mark.parametrize("scales", ["one", "each head", "each key"])
@pytest.mark.parametrize("page_size", [0, 1, 16])
def test_larger_trees_over_fp8_go_by_way_of_a_copy_in_16_bits(page_size: int, scales: str) -> None:
    shape = Shape((8, 1, 5, 30), (300, 5, 65, 1000), 8, 2, 128, dtype=BF16)
    call = call_of(shape, [random_tree(nodes, seed) for seed, nodes in enumerate(shape.queries)], page_size)
    small, wide = quantized(call, scales)
    out, _ = on_gpu(small, **bounds(shape))
    assert_as_exact_as_ideal(out, None, call, wide, **bounds(shape))


def test_a_repeated_call_reads_its_own_tree() -> None:
    calls = [
        {**paged(LONG, 16), "tree_mask": tree_mask([random_tree(nodes, seed) for nodes in LONG.queries])}
        for seed in range(4)
    ]
    for call in calls:
        result = on_gpu(call, **bounds(LONG))
        assert_as_exact_as_pytorch(*result, call, **bounds(LONG))


def test_a_captured_graph_reads_the_tree_that_is_there() -> None:
    call = to(call_of(LONG, LONG_TREES, 16), "cuda")
    attention_varlen(**call, **bounds(LONG))  # type: ignore[arg-type]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_varlen(**call, **bounds(LONG))  # type: ignore[arg-type]
    other = tree_mask([chain(nodes) for nodes in LONG.queries], spare_rows=2)
    call["tree_mask"].copy_(other)
    graph.replay()
    assert isinstance(out, torch.Tensor)
    again = attention_varlen(**call, **bounds(LONG))
    assert torch.equal(out, again)
