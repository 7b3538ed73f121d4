"""The Hopper kernel without a GPU: what is chosen, what fits, and the header of wgmma."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_science.configs.attention import hopper as configs
from flashmoe_science.cuda.attention import hopper
from flashmoe_science.cuda.attention.problem import KernelKind, Problem
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import check_block
from problems import H200

HEADER = Path(__file__).parents[4] / "src/flashmoe_science/kernels/cuda/ptx/wgmma.cuh"
PROBLEM = Problem(
    batch=2,
    num_heads=8,
    num_kv_heads=2,
    seqlen_q=1024,
    seqlen_k=1024,
    head_dim=128,
    dtype=torch.bfloat16,
    causal=True,
    softmax_scale=0.1,
    return_lse=False,
    query_strides=(8 * 1024 * 128, 1024 * 128, 128),
    key_strides=(2 * 1024 * 128, 1024 * 128, 128),
    value_strides=(2 * 1024 * 128, 1024 * 128, 128),
    output_strides=(8 * 1024 * 128, 1024 * 128, 128),
)


def test_takes_a_common_problem() -> None:
    choice = hopper.choose(PROBLEM, H200)
    assert choice is not None
    assert choice.kernel is KernelKind.HOPPER
    assert choice.configuration.head_dim == 128


@pytest.mark.parametrize(
    "change",
    [
        {"softmax_scale": -0.1},
        {"softmax_scale": 0.0},
        {"seqlen_k": 0},
        {"seqlen_q": 16},
        {"key_strides": (0, 1024 * 128, 128)},
    ],
)
def test_leaves_what_it_cannot_do(change: dict[str, object]) -> None:
    assert hopper.choose(replace(PROBLEM, **change), H200) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": False}, "causal is False; expected the True of"),
        ({"head_dim": 256}, "head_dim is 256; expected at most the 128 of"),
        ({"seqlen_k": 0}, "got 0 keys"),
        ({"softmax_scale": 0.0}, "positive softmax_scale"),
        ({"key_strides": (0, 1024 * 128, 128)}, "expanded"),
    ],
)
def test_a_choice_for_another_problem_is_refused(change: dict[str, object], message: str) -> None:
    choice = hopper.choose(PROBLEM, H200)
    assert choice is not None
    hopper.check(PROBLEM, choice.configuration)
    with pytest.raises(InputError, match=message):
        hopper.plan(replace(PROBLEM, **change), choice.configuration, H200)  # type: ignore[arg-type]


def test_leaves_what_its_compiler_would_serialise() -> None:
    assert hopper.choose(PROBLEM, replace(H200, nvrtc=(12, 8))) is None
    assert hopper.choose(PROBLEM, replace(H200, nvrtc=(12, 9))) is not None


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_leaves_other_architectures(architecture: str) -> None:
    assert hopper.choose(PROBLEM, replace(H200, architecture=architecture)) is None
    assert hopper.kernels(architecture) == []


@given(
    head_dim=st.integers(1, 32).map(lambda x: 8 * x),
    causal=st.booleans(),
    seqlen=st.integers(1, 1 << 20),
    slices=st.integers(1, 4096),
    multiprocessors=st.sampled_from([78, 114, 132]),
)
def test_every_choice_is_built_ahead_and_fits(
    head_dim: int, causal: bool, seqlen: int, slices: int, multiprocessors: int
) -> None:
    tile = configs.configuration(head_dim, causal, seqlen, seqlen, slices, multiprocessors)
    assert tile in configs.all_configurations()
    assert tile.head_dim >= head_dim
    check_block("tile", "sm_90", tile.threads, tile.shared_bytes)


@pytest.mark.parametrize(
    ("heads", "seqlen", "block_m"),
    # As measured: short tiles where tall ones leave multiprocessors idle in a wave or two, else tall ones.
    [(8, 512, 128), (8, 2048, 128), (8, 4096, 128), (1024, 512, 192), (256, 2048, 192), (32, 16384, 192)],
)
def test_short_tiles_fill_the_chip_where_tiles_are_few(heads: int, seqlen: int, block_m: int) -> None:
    assert configs.configuration(64, False, seqlen, seqlen, heads, 132).block_m == block_m


@pytest.mark.parametrize(
    ("heads", "seqlen", "consumers"),
    # As raced on an H200: up to two narrow tiles a multiprocessor the longest ones decide; narrow tiles win beyond.
    [
        (8, 1024, 1),
        (8, 2048, 1),
        (16, 1024, 1),
        (4, 4096, 1),
        (16, 2048, 1),
        (1024, 512, 2),
        (512, 1024, 2),
        (256, 8192, 3),
    ],
)
def test_short_tiles_under_a_causal_mask_where_the_longest_decide(
    heads: int, seqlen: int, consumers: int
) -> None:
    tile = configs.configuration(64, True, seqlen, seqlen, heads, 132)
    assert tile.consumers == consumers
    assert tile.blocks_per_multiprocessor * (tile.shared_bytes + 1024) <= 228 * 1024


@given(seqlen=st.integers(1, 1 << 20), head_dim=st.integers(1, 32).map(lambda x: 8 * x))
def test_sections_hold_whole_groups_of_heads(seqlen: int, head_dim: int) -> None:
    problem = replace(PROBLEM, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim)
    heads = hopper._heads_per_section(problem)
    group = problem.num_heads // problem.num_kv_heads
    assert heads % group == 0
    assert group <= heads <= problem.batch * problem.num_heads


def test_the_header_has_every_width_that_is_configured() -> None:
    used = {width for tile in configs.all_configurations() for width in (tile.block_n, tile.head_dim)}
    assert used <= {numbers[0] for numbers in _widths()}


def test_the_numbers_of_operands_follow_from_the_width() -> None:
    for width, tens, ones, *others in _widths():
        accumulators = width // 2
        assert (tens, ones) == divmod(accumulators, 10)
        assert others == [accumulators + i for i in range(7)]


def _widths() -> list[list[int]]:
    text = HEADER.read_text()
    return [
        [int(number) for number in each.split(",")] for each in re.findall(r"^WGMMA\((.*)\)$", text, re.M)
    ]
