"""The portable kernel without a GPU: its tiles, what is chosen, and what a launch passes."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_science.configs.attention import portable as configs
from flashmoe_science.cuda.attention import Problem, portable
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import LIMITS, check_block, limits
from flashmoe_science.jit.nvrtc import KERNEL_DIRECTORY
from problems import H200

ARCHITECTURES = st.sampled_from(configs.tuned_architectures())
HEAD_DIMS = st.integers(1, 32).map(lambda n: 8 * n)
PROBLEM = Problem(
    batch=2,
    num_heads=8,
    num_kv_heads=2,
    seqlen_q=1000,
    seqlen_k=3000,
    head_dim=64,
    dtype=torch.bfloat16,
    causal=True,
    softmax_scale=0.125,
    return_lse=False,
    query_strides=(8 * 1000 * 64, 1000 * 64, 64),
    key_strides=(2 * 3000 * 64, 3000 * 64, 64),
    value_strides=(2 * 3000 * 64, 3000 * 64, 64),
    output_strides=(8 * 1000 * 64, 1000 * 64, 64),
)


def test_every_architecture_has_tiles() -> None:
    assert set(configs.tuned_architectures()) == set(LIMITS)


@given(ARCHITECTURES, HEAD_DIMS, st.booleans(), st.integers(0, 1 << 20))
def test_tiles_fit_and_are_built_ahead(architecture: str, head_dim: int, causal: bool, keys: int) -> None:
    built = configs.all_configurations(architecture)
    for tile in (
        configs.tall(architecture, head_dim, causal, keys),
        configs.short(architecture, head_dim),
    ):
        assert tile in built
        assert head_dim <= tile.head_dim == configs.compiled_head_dim(head_dim)
        check_block(tile.label, architecture, tile.threads, tile.shared_bytes)
        # What the kernel's static_asserts ask for.
        assert tile.block_m % (16 * tile.warps) == 0
        assert tile.block_n % 16 == 0
        assert not tile.overlap or tile.query_steps == tile.head_dim // 16
        assert tile.cp_async == limits(architecture).cp_async
        assert (tile.mma_k == 16) == limits(architecture).bfloat16


def test_a_tile_for_another_head_dim_is_refused() -> None:
    tile = configs.short("sm_90", 64)
    portable.check(PROBLEM, tile)
    with pytest.raises(InputError, match="head_dim is 128; expected at most the 64 of the tile"):
        portable.plan(dataclasses.replace(PROBLEM, head_dim=128), tile, H200)
    with pytest.raises(InputError, match="takes a PortableConfiguration"):
        portable.plan(PROBLEM, None, H200)


def test_the_tile_follows_the_number_of_keys() -> None:
    full = [configs.tall("sm_90", 64, False, keys).block_n for keys in (1, 2047, 2048, 100_000)]
    assert full == [64, 64, 48, 48]
    causal = [configs.tall("sm_90", 64, True, keys).block_m for keys in (1, 2047, 2048, 8191, 8192)]
    assert causal == [64, 64, 128, 128, 128]


@pytest.mark.parametrize(("rows", "short"), [(128, True), (128 * 131, True), (128 * 132, False)])
def test_few_rows_take_the_short_tile(rows: int, short: bool) -> None:
    """Fewer than one warp for each of the four schedulers of a multiprocessor, with tiles of 128 rows."""
    problem = dataclasses.replace(PROBLEM, batch=1, num_heads=1, num_kv_heads=1, seqlen_q=rows, causal=False)
    choice = portable.choose(problem, H200)
    assert choice is not None
    expected = configs.short("sm_90", 64) if short else configs.tall("sm_90", 64, False, 3000)
    assert choice.configuration == expected
    assert ("would not fill" in choice.reason) == short


def test_small_blocks_count_for_what_they_fill() -> None:
    """Two warps per block fill half of a multiprocessor's schedulers."""
    causal = dataclasses.replace(PROBLEM, batch=1, num_heads=1, num_kv_heads=1, seqlen_k=1024)
    enough = portable.choose(dataclasses.replace(causal, seqlen_q=64 * 264), H200)
    assert enough is not None
    assert enough.configuration.warps == 2
    too_few = portable.choose(dataclasses.replace(causal, seqlen_q=64 * 263), H200)
    assert too_few is not None
    assert too_few.configuration == configs.short("sm_90", 64)


def test_bfloat16_needs_sm_80() -> None:
    turing = dataclasses.replace(H200, architecture="sm_75")
    assert portable.choose(PROBLEM, turing) is None
    assert portable.choose(dataclasses.replace(PROBLEM, dtype=torch.float16), turing) is not None
    assert {kernel.macros["ELEMENT_BF16"] for kernel in portable.kernels("sm_75")} == {0}


def fields(problem: Problem) -> dict[str, float]:
    """What a launch passes, by the names of the struct in the kernel's source."""
    text = (KERNEL_DIRECTORY / "attention_portable.cu").read_text()
    body = text[text.index("struct AttentionParameters") :]
    body = body[: body.index("};")]
    declared = re.sub(r"//[^\n]*", "", body[body.index("{") + 1 :])
    names = []
    for declaration in declared.split(";"):
        names += re.findall(r"(\w+)\s*(?:,|$)", declaration.strip())
    pointers = ["query", "key", "value", "output", "lse"]
    assert names[:5] == pointers
    tile = configs.tall("sm_90", problem.head_dim, problem.causal, problem.seqlen_k)
    values = portable._fields(problem, tile, H200)
    return dict(zip(names[5:], values, strict=True))


def test_a_launch_passes_the_fields_of_the_headers_struct_in_order() -> None:
    passed = fields(PROBLEM)
    assert passed["query_batch"] == 2 * PROBLEM.query_strides[0]
    assert passed["value_row"] == 2 * 64
    assert passed["num_heads"] == 8
    assert passed["heads_per_kv_head"] == 4
    assert (passed["seqlen_q"], passed["seqlen_k"], passed["head_dim"]) == (1000, 3000, 64)
    assert passed["causal_offset"] == 2000
    assert passed["last_rows_first"] == 1
    assert passed["num_row_blocks"] == 8
    assert passed["num_slices"] == 16


@pytest.mark.parametrize(("scale", "flip"), [(0.5, 0), (-0.5, 1)])
def test_the_kernels_scale_is_positive(scale: float, flip: int) -> None:
    """A negative scale flips the query's signs."""
    passed = fields(dataclasses.replace(PROBLEM, softmax_scale=scale))
    assert passed["scale_log2"] > 0
    assert passed["query_xor"] == (0x80008000 if flip else 0)


@given(keys=st.integers(0, 1 << 20), l2=st.integers(1 << 20, 1 << 27))
def test_sections_hold_whole_groups_of_heads(keys: int, l2: int) -> None:
    problem = dataclasses.replace(PROBLEM, seqlen_k=keys)
    slices = portable._slices_per_section(problem, dataclasses.replace(H200, l2_bytes=l2))
    assert slices % 4 == 0
    assert 4 <= slices <= 16
    full = dataclasses.replace(problem, causal=False)
    assert portable._slices_per_section(full, H200) == 1
