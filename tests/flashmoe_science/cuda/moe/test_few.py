"""The way for few tokens without a GPU: what is chosen and passed, and the kernels' sources run on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import compile_emulation
from moe_products import random_ids
from moe_whole import Arguments, arguments, assert_right

from flashmoe_science.configs.moe_few import FewConfiguration, FewProduct, FewWay
from flashmoe_science.cuda import Device
from flashmoe_science.cuda.moe import few
from flashmoe_science.cuda.moe.few import Product
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.moe_arguments import Activation, W13Layout

BF16, FP16 = torch.bfloat16, torch.float16
H200 = Device(index=0, architecture="sm_90", multiprocessors=132, l2_bytes=60 << 20)
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")
A, L, P = Activation, W13Layout, FewProduct
SPLIT, TILES, COMBINED = FewWay


def launch(
    kernel: CudaKernel,
    parameters: str,
    buffer: Any,
    addresses: list[int],
    grid: int,
    folder: Path,
    late: bool,
) -> None:
    folder.mkdir()
    library = compile_emulation(kernel, parameters, folder, copies_late=late)
    (ctypes.c_uint64 * 5).from_buffer(buffer)[:] = addresses
    library.run(buffer, grid)


def emulate(
    problem: MoeProblem,
    configuration: FewConfiguration,
    given: Arguments,
    folder: Path,
    *,
    blocks: int = 2,
    late: bool = True,
) -> None:
    few.check(problem, configuration)
    device = dataclasses.replace(H200, multiprocessors=blocks)
    middle = torch.full((problem.slots, problem.intermediate), torch.nan, dtype=problem.dtype)
    rows = torch.full((problem.slots, problem.hidden), torch.nan, dtype=problem.dtype)
    x, w13, w2, weights, ids, out = (
        getattr(given, field.name).data_ptr() for field in dataclasses.fields(given)
    )
    results = rows.data_ptr() if not configuration.combined else out
    for product, addresses in (
        (Product.UP, [x, w13, weights, ids, middle.data_ptr()]),
        (Product.DOWN, [middle.data_ptr(), w2, weights, ids, results]),
    ):
        kernel = few.product_kernel(
            configuration, product, problem.activation, problem.dtype, problem.ids64, "sm_90"
        )
        buffer = ctypes.create_string_buffer(few.PRODUCT_BYTES)
        few.write_product(buffer, problem, configuration, product)
        grid = few.blocks(problem, configuration, product, device)
        launch(kernel, "Parameters", buffer, addresses, grid, folder / product.value, late)
    if not configuration.combined:
        kernel = few.combine_kernel(problem.dtype, problem.ids64, "sm_90")
        buffer = ctypes.create_string_buffer(few.COMBINE_BYTES)
        few.write_combine(buffer, problem)
        chunks = problem.tokens * problem.hidden // 8
        grid = -(-chunks // kernel.threads_per_block)
        addresses = [rows.data_ptr(), weights, ids, out, 0]
        launch(kernel, "CombineParameters", buffer, addresses, grid, folder / "combine", late)


FUSED = FewConfiguration(P(SPLIT, 2, 1, 1, 3, 2), P(COMBINED, 1, 1, 2, 3, 2), 64)
WIDE = FewConfiguration(P(SPLIT, 3, 2, 2, 2, 3), P(COMBINED, 2, 2, 1, 2, 4, parts=2), 64)
DIRECT = FewConfiguration(P(SPLIT, 1, 1, 1, 4, 4), P(COMBINED, 1, 1, 1, 4, 4, parts=4), 32, direct=True)
OWN_TILES = FewConfiguration(P(TILES, 2, 2, 2, 3, 2), P(TILES, 1, 4, 1, 2, 2), 256)
BY_SLOTS = FewConfiguration(P(TILES, 1, 3, 1, 4, 4), P(SPLIT, 4, 2, 1, 2, 3), 128)


@NEEDS_COMPILER
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    (
        "configuration",
        "tokens",
        "hidden",
        "intermediate",
        "experts",
        "k",
        "dtype",
        "activation",
        "layout",
        "ids64",
    ),
    [
        (FUSED, 13, 144, 80, 5, 2, BF16, A.SILU, L.CONCAT, False),
        (FUSED, 3, 16, 16, 70, 5, FP16, A.RELU2_NO_MUL, L.CONCAT, True),
        (WIDE, 30, 80, 112, 3, 2, BF16, A.GELU_TANH, L.INTERLEAVED, False),
        (DIRECT, 1, 176, 80, 16, 8, BF16, A.SILU, L.INTERLEAVED, False),
        (DIRECT, 3, 48, 112, 4, 3, FP16, A.GELU, L.CONCAT, True),
        (OWN_TILES, 40, 144, 80, 5, 2, BF16, A.SILU, L.CONCAT, True),
        (BY_SLOTS, 40, 80, 48, 3, 3, FP16, A.SILU_NO_MUL, L.CONCAT, False),
    ],
)
def test_emulated(
    configuration: FewConfiguration,
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    k: int,
    dtype: torch.dtype,
    activation: Activation,
    layout: W13Layout,
    ids64: bool,
    late: bool,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    problem = MoeProblem(tokens, hidden, intermediate, experts, k, dtype, activation, layout, ids64)
    given = arguments(problem, random_ids(tokens, k, experts, invalid=0.2))
    emulate(problem, configuration, given, tmp_path, late=late)
    assert_right(problem, given)
