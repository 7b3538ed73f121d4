"""Trees of draft tokens in every CUDA kernel, emulated: see ../../tree_cases.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import emulated_hopper_varlen
import emulated_varlen
import pytest
import torch
from compiled_for import each_architecture
from emulated import NEEDS_COMPILER
from emulated_decode import inputs_of, options, run_on_cpu
from tree_cases import FEW, TREES, call_of, chain, random_tree, shape_of, tree_mask
from varlen_cases import NAN, Call, Shape, bounds, packed, paged, quantized
from varlen_quantized import assert_as_exact_as_ideal
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science.cuda.varlen import decode, decode_calls, hopper, portable
from flashmoe_science.cuda.varlen.kind import VarlenKernel
from flashmoe_science.cuda.varlen.select import candidates
from flashmoe_science.jit.nvrtc import CudaKernel, compile_kernel
from flashmoe_science.varlen.arguments import check
from flashmoe_science.varlen.problem import Problem, Sizes
from problems import H200

BF16 = torch.bfloat16
Result = tuple[torch.Tensor, torch.Tensor]
MORE: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "two ahead": {"causal": False, "window": (-1, 2)},
}
each_page_size = pytest.mark.parametrize("page_size", [0, 16, 1])
each_trees = pytest.mark.parametrize("trees", TREES)
each_few = pytest.mark.parametrize("trees", FEW)


def decoded(call: Call, shape: Shape, grid: int = 5, **given: Any) -> Result:
    return run_on_cpu(call, options(**given), tuple(bounds(shape).values()), grid)


def assert_right(result: Result, call: Call, shape: Shape, **given: Any) -> None:
    assert_as_exact_as_pytorch(*result, call, **{**bounds(shape), **given})


@NEEDS_COMPILER
@each_page_size
@pytest.mark.parametrize("mask", MORE)
@each_few
def test_decode(trees: str, mask: str, page_size: int) -> None:
    shape, parents = shape_of(trees)
    call = call_of(shape, parents, page_size)
    assert_right(decoded(call, shape, **MORE[mask]), call, shape, **MORE[mask])


@NEEDS_COMPILER
@pytest.mark.parametrize("grid", [1, 7])
def test_decode_with_everything_else(grid: int) -> None:
    shape, parents = shape_of("random")
    call = call_of(shape, parents, 16) | {"sinks": torch.tensor([0.5, -torch.inf, 2.0, 0.0])}
    given = {"split_keys": 128, "softcap": 3.0}
    assert_right(decoded(call, shape, grid, **given), call, shape, **given)


@NEEDS_COMPILER
@pytest.mark.parametrize(("scales", "page_size"), [("each head", 16), ("each key", 16), ("each key", 1)])
def test_decode_over_a_cache_of_fp8(scales: str, page_size: int) -> None:
    shape, parents = shape_of("random", head_dim=64)
    call = call_of(shape, parents, page_size)
    small, wide = quantized(call, scales)
    assert_as_exact_as_ideal(*decoded(small, shape), call, wide, **bounds(shape))


@NEEDS_COMPILER
@each_page_size
@pytest.mark.parametrize(
    ("trees", "mask"), [*((trees, "causal") for trees in TREES), *(("random", mask) for mask in MORE)]
)
def test_portable(trees: str, mask: str, page_size: int) -> None:
    shape, parents = shape_of(trees)
    call = call_of(shape, parents, page_size)
    given = MORE[mask]
    assert_right(emulated_varlen.attend(call, short=True, **bounds(shape), **given), call, shape, **given)


@NEEDS_COMPILER
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize(
    ("trees", "mask"), [*((trees, "causal") for trees in TREES), *(("random", mask) for mask in MORE)]
)
def test_hopper(trees: str, mask: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, parents = shape_of(trees, head_dim=64)
    call = call_of(shape, parents, page_size)
    given = MORE[mask]
    result = emulated_hopper_varlen.attend(call, monkeypatch, **bounds(shape), **given)
    assert_right(result, call, shape, **given)


def each_kernel(call: Call, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> dict[str, Result]:
    """Results of all that take so many queries."""
    results = {
        "portable": emulated_varlen.attend(call, short=True, **bounds(shape)),
        "hopper": emulated_hopper_varlen.attend(call, monkeypatch, **bounds(shape)),
    }
    if max(shape.queries) <= decode_calls.MOST_QUERIES:
        results["decode"] = decoded(call, shape)
    return results


@NEEDS_COMPILER
def test_a_chain_is_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((5, 8, 3), (40, 8, 130), head_dim=64, dtype=BF16)
    call = packed(shape)
    with_tree = {**call, "tree_mask": tree_mask([chain(nodes) for nodes in shape.queries])}
    causal = each_kernel(call, shape, monkeypatch)
    for name, (out, lse) in each_kernel(with_tree, shape, monkeypatch).items():
        assert torch.equal(out, causal[name][0]), name
        assert torch.equal(lse, causal[name][1]), name


@NEEDS_COMPILER
@pytest.mark.parametrize("page_size", [0, 1, 16])
def test_keys_that_no_row_sees_have_no_effect(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of queries: node 3 of the first tree is seen by nobody, node 1 of the second only from before it."""
    shape = Shape((6, 4), (70, 9), head_dim=64, dtype=BF16)
    call = paged(shape, page_size) if page_size else packed(shape)
    call["tree_mask"] = torch.tensor([1, 3, 5, 1, 17, 33, 3, 1, 5, 9])
    clean = each_kernel(call, shape, monkeypatch)
    for sequence, key in ((0, 64 + 3), (1, 5 + 1)):
        for name in ("key", "value"):
            if page_size:
                page = call["block_table"][sequence, key // page_size]
                call[name][page, key % page_size] = NAN
            else:
                call[name][call["cu_seqlens_k"][sequence] + key] = NAN
    for name, (out, lse) in each_kernel(call, shape, monkeypatch).items():
        assert torch.equal(out, clean[name][0]), name
        assert torch.equal(lse, clean[name][1]), name


@NEEDS_COMPILER
def test_rows_that_see_nothing_are_zero_whatever_others_see(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((3, 2), (3, 1), head_dim=64, dtype=BF16)
    call = {**packed(shape), "tree_mask": torch.tensor([0, 2, 6, 1, 0])}
    call["value"][2] = NAN
    for name, (out, lse) in each_kernel(call, shape, monkeypatch).items():
        assert not out[[0, 3, 4]].any(), name
        assert lse[[0, 3, 4]].isneginf().all(), name
        assert out[2].isnan().all(), name


@NEEDS_COMPILER
def test_a_prompt_beside_trees_has_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((65, 64, 4), (80, 150, 50), head_dim=64, dtype=BF16)
    call = packed(shape, spare_rows=3)
    trees = [random_tree(64, 0), random_tree(4, 1)]
    mask = torch.cat([torch.zeros(65, dtype=torch.int64), tree_mask(trees, spare_rows=3)])
    causal = each_kernel(call, shape, monkeypatch)
    for name, (out, lse) in each_kernel({**call, "tree_mask": mask}, shape, monkeypatch).items():
        assert torch.equal(out[:65], causal[name][0][:65]), name
        assert not torch.equal(out[65:133], causal[name][0][65:133]), name
        assert not out[133:].any()
        assert lse[133:].isneginf().all()


# --- on the host


def problem_of(head_dim: int = 128, tree: bool = True, page_size: int = 16, **changes: Any) -> Problem:
    shape, parents = shape_of("random", head_dim=head_dim, heads=8)
    call = call_of(shape, parents, page_size)
    if not tree:
        del call["tree_mask"]
    return check(inputs_of(call), options(**changes))


def kernels_of(problem: Problem) -> list[CudaKernel]:
    tile = emulated_hopper_varlen.tile_of(problem)
    general = emulated_varlen.tiles("sm_80", 128, 128, portable.features(problem)).short
    return [
        decode.kernel(decode.configuration_for(problem, Sizes(8, 8, 300), H200), BF16, "sm_90"),
        hopper.kernel(tile, BF16),
        portable.kernel(general, BF16, "sm_80"),
    ]


def test_only_calls_with_trees_have_kernels_with_them() -> None:
    for without, with_trees in zip(kernels_of(problem_of(tree=False)), kernels_of(problem_of()), strict=True):
        assert "TREE" not in without.macros
        assert with_trees.macros["TREE"] == 1
    assert replace(problem_of(), tree=False) == problem_of(tree=False)


@pytest.mark.parametrize("queries", [1, 8, 15, 16, 64, 4000])
def test_trees_of_every_size_have_a_kernel(queries: int) -> None:
    for problem in (problem_of(), problem_of(page_size=1), problem_of(256)):
        for device in (H200, replace(H200, architecture="sm_80")):
            sizes = Sizes(1, queries, 5000)
            taking = candidates(problem, device, sizes, queries)
            without = candidates(replace(problem, tree=False), device, sizes, queries)
            assert taking == [kind for kind in without if kind is not VarlenKernel.DECODE_HOPPER]


@each_architecture(["sm_80", "sm_90"])
@pytest.mark.parametrize(
    "head_dim", [pytest.param(64, marks=pytest.mark.slow), 128, pytest.param(256, marks=pytest.mark.slow)]
)
def test_kernels_with_trees_keep_everything_in_registers(
    head_dim: int, architecture: str, nvrtc: None
) -> None:
    problem = problem_of(head_dim)
    tiles = emulated_varlen.tiles(architecture, head_dim, head_dim, portable.features(problem))
    for tile in (tiles.tall, tiles.short):
        compile_kernel(portable.kernel(tile, BF16, architecture))
    if architecture != "sm_90":
        return
    for page_size in (16, 1) if head_dim <= 128 else (16,):
        of_pages = problem_of(head_dim, page_size=page_size)
        for queries in (1, 8):
            configuration = decode.configuration_for(of_pages, Sizes(8, queries, 300), H200)
            compile_kernel(decode.kernel(configuration, BF16, "sm_90"))
    compile_kernel(hopper.kernel(emulated_hopper_varlen.tile_of(problem), BF16))
    assert emulated_hopper_varlen.tile_of(problem, wide=True) == emulated_hopper_varlen.tile_of(problem)
