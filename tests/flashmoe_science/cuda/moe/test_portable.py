"""The portable products without a GPU: tiles, what is chosen and passed, and the kernel's source run on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import re

import pytest
import torch
from emulated import NEEDS_COMPILER, compile_emulation
from hypothesis import given
from hypothesis import strategies as st
from moe_products import Routing, assert_right, operands, random_ids, routing

from flashmoe_science.configs.moe import portable as configs
from flashmoe_science.configs.moe.portable import ProductTile
from flashmoe_science.cuda.moe import portable
from flashmoe_science.cuda.moe.portable import Product
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import LIMITS, check_block
from flashmoe_science.jit.nvrtc import KERNEL_DIRECTORY
from flashmoe_science.moe_arguments import Activation, W13Layout
from problems import H200

BF16, FP16 = torch.bfloat16, torch.float16
ARCHITECTURES = st.sampled_from(configs.tuned_architectures())
PROBLEM = MoeProblem(
    tokens=4096,
    hidden=2048,
    intermediate=768,
    experts=128,
    top_k=8,
    dtype=BF16,
    activation=Activation.SILU,
    w13_layout=W13Layout.CONCAT,
    ids64=False,
)


def test_every_architecture_from_sm_80_has_tiles() -> None:
    assert set(configs.tuned_architectures()) == set(LIMITS) - {"sm_75"}
    assert portable.kernels("sm_75") == []
    assert portable.choose(PROBLEM, dataclasses.replace(H200, architecture="sm_75")) is None


@given(ARCHITECTURES, st.floats(0, 1e6))
def test_tiles_fit_and_are_built_ahead(architecture: str, rows_per_expert: float) -> None:
    configuration = configs.configuration(architecture, rows_per_expert)
    assert configuration in configs.all_configurations(architecture)
    for tile in (configuration.up, configuration.down):
        for gather in (True, False):
            check_block(tile.label, architecture, tile.threads, tile.shared_bytes(gather))
        # What the kernel's static_asserts ask for, with and without a gate.
        assert tile.block_m % (16 * tile.warps_m) == 0
        assert tile.block_n // tile.warps_n % (64 if tile is configuration.up else 32) == 0
        rows_per_pass = tile.threads // (tile.block_k // 8)
        assert rows_per_pass % 16 == 0
        assert tile.block_m % rows_per_pass == tile.block_n % rows_per_pass == 0


def declared(struct: str, header: str) -> list[str]:
    """Names of a struct's fields, in order."""
    text = re.sub(r"//[^\n]*", "", (KERNEL_DIRECTORY / header).read_text())
    body = text[text.index(f"struct {struct} {{") :]
    body = body[body.index("{") + 1 : body.index("};")]
    return [match[1] for match in re.finditer(r"(\w+)\s*;", body)]


def passed(problem: MoeProblem, product: Product) -> dict[str, int]:
    tile = configs.configuration("sm_90", problem.rows_per_expert).up
    names = declared("ProductParameters", "moe/portable_parameters.cuh")
    pointers = ["input", "weights", "output", "expert_offsets", "sorted_slots", "ticket", "bias"]
    assert names[:7] == pointers
    return dict(zip(names[7:], portable.fields(problem, product, tile, H200), strict=True))


def test_a_launch_passes_the_fields_of_the_headers_struct_in_order() -> None:
    up = passed(PROBLEM, Product.UP)
    assert (up["inner"], up["columns"], up["experts"], up["top_k"]) == (2048, 768, 128, 8)
    assert up["weight_expert"] == 2 * 2 * 768 * 2048
    assert (up["weight_column"], up["weight_part"]) == (2 * 2048, 2 * 2048 * 768)
    assert up["column_tiles"] == 6
    down = passed(PROBLEM, Product.DOWN)
    assert (down["inner"], down["columns"], down["column_tiles"]) == (768, 2048, 8)
    assert down["weight_expert"] == 2 * 2048 * 768


def test_what_32_bits_cannot_count_is_refused() -> None:
    tile = configs.configuration("sm_90", 1e6)
    portable.check(PROBLEM, tile)
    huge = dataclasses.replace(PROBLEM, tokens=1 << 28, hidden=1 << 14)
    assert portable.choose(huge, H200) is None
    assert portable.choose(dataclasses.replace(PROBLEM, experts=1 << 20), H200) is None
    with pytest.raises(InputError, match="split the tokens"):
        portable.check(huge, tile)
    with pytest.raises(InputError, match="take a PortableMoeConfiguration"):
        portable.check(PROBLEM, tile.up)


def test_layouts_of_the_gate() -> None:
    interleaved = dataclasses.replace(PROBLEM, w13_layout=W13Layout.INTERLEAVED)
    up = passed(interleaved, Product.UP)
    assert (up["weight_column"], up["weight_part"]) == (2 * 2 * 2048, 2 * 2048)
    ungated = dataclasses.replace(interleaved, activation=Activation.RELU2_NO_MUL)
    up = passed(ungated, Product.UP)
    assert (up["weight_expert"], up["weight_column"]) == (2 * 768 * 2048, 2 * 2048)
    assert passed(interleaved, Product.DOWN)["weight_column"] == 2 * 768


@given(
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    block_m=st.sampled_from([32, 64, 128]),
)
def test_the_grid_covers_every_routing(counts: list[int], block_m: int) -> None:
    """With fewer tiles than places, each tile has its own block whatever the routing."""
    problem = dataclasses.replace(PROBLEM, tokens=max(sum(counts), 1), top_k=1, experts=len(counts))
    tile = ProductTile(block_m, 256, 64, 4, 1, 4)
    huge = dataclasses.replace(H200, multiprocessors=1 << 30)
    tiles = sum(-(-count // block_m) for count in counts) * 6
    assert portable.grid(problem, Product.UP, tile, huge) >= tiles


def emulate(
    problem: MoeProblem,
    product: Product,
    tile: ProductTile,
    routed: Routing,
    *,
    blocks: int,
    copies_late: bool = True,
) -> None:
    """Run one product; it must be right."""
    given = operands(problem, product, routed)
    device = dataclasses.replace(H200, multiprocessors=blocks)
    built = portable.kernel(tile, product, problem.activation, problem.dtype, "sm_90")
    library = compile_emulation(built, "ProductParameters", copies_late=copies_late)
    arguments = ctypes.create_string_buffer(portable.ARGUMENT_BYTES)
    ctypes.memmove(
        ctypes.addressof(arguments) + portable.POINTERS.size,
        portable._REST.pack(*portable.fields(problem, product, tile, device)),
        portable._REST.size,
    )
    (ctypes.c_uint64 * 7).from_buffer(arguments)[:] = given.addresses(routed)
    library.run(arguments, portable.grid(problem, product, tile, device))
    assert_right(problem, product, routed, given)


UP, DOWN = Product.UP, Product.DOWN
A, L = Activation, W13Layout


@NEEDS_COMPILER
@pytest.mark.parametrize(
    (
        "product",
        "tile",
        "tokens",
        "hidden",
        "intermediate",
        "experts",
        "k",
        "dtype",
        "activation",
        "layout",
        "late",
    ),
    [
        (UP, ProductTile(64, 128, 64, 3, 2, 2), 40, 144, 80, 5, 2, BF16, A.SILU, L.CONCAT, True),
        (UP, ProductTile(32, 128, 32, 4, 1, 2), 15, 16, 144, 37, 3, FP16, A.GELU, L.INTERLEAVED, True),
        (UP, ProductTile(32, 128, 32, 4, 1, 2), 15, 16, 144, 37, 3, FP16, A.GELU, L.INTERLEAVED, False),
        (UP, ProductTile(64, 128, 32, 2, 2, 2), 33, 80, 32, 3, 1, BF16, A.GELU_TANH, L.INTERLEAVED, False),
        (UP, ProductTile(32, 128, 32, 3, 2, 2), 21, 48, 144, 4, 2, BF16, A.RELU2_NO_MUL, L.CONCAT, True),
        (UP, ProductTile(32, 128, 64, 2, 1, 4), 9, 112, 16, 4, 4, FP16, A.GELU_NO_MUL, L.CONCAT, False),
        (UP, ProductTile(32, 128, 32, 3, 2, 2), 40, 48, 80, 4, 2, BF16, A.SWIGLU_OAI, L.CONCAT, True),
        (UP, ProductTile(64, 128, 64, 3, 2, 2), 33, 80, 144, 3, 2, FP16, A.SWIGLU_OAI, L.INTERLEAVED, True),
        (DOWN, ProductTile(64, 128, 64, 3, 2, 2), 30, 80, 144, 3, 2, BF16, A.SILU, L.CONCAT, False),
        (DOWN, ProductTile(32, 64, 32, 4, 1, 2), 50, 80, 16, 40, 1, FP16, A.SILU, L.CONCAT, True),
    ],
)
def test_emulated(
    product: Product,
    tile: ProductTile,
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    k: int,
    dtype: torch.dtype,
    activation: Activation,
    layout: W13Layout,
    late: bool,
) -> None:
    torch.manual_seed(0)
    problem = MoeProblem(tokens, hidden, intermediate, experts, k, dtype, activation, layout, False)
    if activation is A.SWIGLU_OAI or dtype is FP16:
        problem = dataclasses.replace(problem, w13_biased=True, w2_biased=True)
    routed = routing(random_ids(tokens, k, experts, invalid=0.2), experts)
    emulate(problem, product, tile, routed, blocks=2, copies_late=late)


@NEEDS_COMPILER
@pytest.mark.parametrize("pattern", ["one expert", "all invalid", "one row each, the last expert none"])
def test_emulated_routings(pattern: str) -> None:
    torch.manual_seed(0)
    problem = MoeProblem(70, 48, 32, 71, 1, BF16, Activation.SILU, W13Layout.CONCAT, False)
    ids = {
        "one expert": torch.full((70, 1), 69, dtype=torch.int32),
        "all invalid": torch.full((70, 1), -5, dtype=torch.int32),
        "one row each, the last expert none": torch.randperm(70).int()[:, None],
    }[pattern]
    # One block, so that the row tiles of an expert are more than a section.
    emulate(problem, UP, ProductTile(16, 128, 32, 3, 1, 2), routing(ids, 71), blocks=1)
