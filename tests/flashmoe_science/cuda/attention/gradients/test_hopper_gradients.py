"""The Hopper kernels of attention backward without a GPU: what they take, and what they are passed."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from flashmoe_science.configs.attention import backward_hopper as configs
from flashmoe_science.cuda.attention.gradients import explain, hopper, wgmma
from flashmoe_science.cuda.attention.gradients.problem import BackwardProblem, GradientKind
from flashmoe_science.errors import InputError
from flashmoe_science.gradients import Needs
from flashmoe_science.jit.limits import check_block
from flashmoe_science.jit.nvrtc import KERNEL_DIRECTORY
from problems import H200

ROWS = (4 * 128 * 64, 128 * 64, 64)
PROBLEM = BackwardProblem(
    batch=2,
    num_heads=4,
    num_kv_heads=4,
    seqlen_q=128,
    seqlen_k=128,
    head_dim=64,
    dtype=torch.bfloat16,
    causal=True,
    softmax_scale=0.125,
    needs=Needs(True, True, True),
    query_strides=ROWS,
    key_strides=ROWS,
    value_strides=ROWS,
    output_strides=ROWS,
    grad_output_strides=ROWS,
    grad_query_strides=ROWS,
    grad_key_strides=ROWS,
    grad_value_strides=ROWS,
)


LONG = {"head_dim": 128, "seqlen_q": 1024, "seqlen_k": 8192}


def test_it_takes_what_tma_can_read_on_sm_90() -> None:
    choice = hopper.choose(PROBLEM, H200)
    assert choice is not None
    assert choice.configuration == configs.HopperBackward(64, True, converts=True)
    hopper.check(PROBLEM, choice.configuration)


@pytest.mark.parametrize(
    ("change", "tile"),
    [
        ({"needs": Needs(False, True, True)}, configs.HopperBackward(64, True)),
        ({"causal": False}, configs.HopperBackward(64, False)),
        ({"causal": False, "head_dim": 72}, configs.HopperBackward(128, False, staggered=True)),
        (
            {"causal": False, "head_dim": 128, "seqlen_k": 768},
            configs.HopperBackward(128, False, staggered=True),
        ),
        ({**LONG, "causal": False, "seqlen_k": 769}, configs.HopperBackward(128, False, wide=True)),
        ({**LONG, "causal": False, "seqlen_q": 384}, configs.HopperBackward(128, False, wide=True)),
        ({**LONG, "causal": False, "seqlen_q": 256}, configs.HopperBackward(128, False)),
        ({**LONG, "seqlen_k": 8191}, configs.HopperBackward(128, True, converts=True)),
        (LONG, configs.HopperBackward(128, True, wide=True)),
        ({**LONG, "seqlen_q": 256}, configs.HopperBackward(128, True, converts=True)),
        ({"seqlen_k": 8192}, configs.HopperBackward(64, True, converts=True)),
        ({"window_left": 0}, configs.HopperBackward(64, True, converts=True, window=True)),
        (
            {"window_left": 30, "needs": Needs(False, True, True)},
            configs.HopperBackward(64, True, window=True),
        ),
        ({**LONG, "window_left": 4095}, configs.HopperBackward(128, True, converts=True, window=True)),
    ],
)
def test_tiles_follow_what_is_asked(change: dict[str, object], tile: configs.HopperBackward) -> None:
    choice = hopper.choose(dataclasses.replace(PROBLEM, **change), H200)  # type: ignore[arg-type]
    assert choice is not None
    assert choice.configuration == tile
    assert tile in configs.all_configurations()


def test_tiles_of_another_problem_are_refused() -> None:
    """Nobody would wait for ever, or write where nothing is asked for."""
    full = dataclasses.replace(PROBLEM, causal=False)
    only_keys = dataclasses.replace(PROBLEM, needs=Needs(False, True, True))
    windowed = dataclasses.replace(PROBLEM, window_left=30)
    for problem, tile in (
        (PROBLEM, configs.HopperBackward(64, True, converts=True, window=True)),
        (full, configs.HopperBackward(64, False, window=True)),
        (windowed, configs.HopperBackward(64, True, converts=True)),
        (windowed, configs.HopperBackward(128, True, wide=True, window=True)),
        (PROBLEM, configs.HopperBackward(64, True, staggered=True)),
        (full, configs.HopperBackward(64, False, converts=True)),
        (only_keys, configs.HopperBackward(64, True, converts=True)),
        (full, configs.HopperBackward(64, False, wide=True)),
        (PROBLEM, configs.HopperBackward(128, True, wide=True, converts=True)),
    ):
        with pytest.raises(InputError):
            hopper.check(problem, tile)
    many = dataclasses.replace(full, seqlen_k=128 * 5)
    with pytest.raises(InputError, match="wait for ever"):
        hopper.plan(
            many,
            configs.HopperBackward(64, False, staggered=True),
            dataclasses.replace(H200, multiprocessors=4),
        )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 136}, "at most 128"),
        ({"softmax_scale": 0.0}, "needs a positive one"),
        ({"seqlen_q": 0}, "no query rows"),
        ({"seqlen_k": 0}, "no keys"),
        ({"needs": Needs(True, False, True)}, "not both are needed"),
        ({"batch": 20000}, "more than 65535 heads"),
        ({"grad_output_strides": (0, 128 * 64, 64)}, "expanded dimension"),
        ({"softcap": 2.0}, "it takes no cap"),
        ({"softcap": 2.0, "window_left": 5}, "it takes no cap"),
        ({"causal": False, "window_left": 5}, "it takes a window only with a causal mask"),
        ({"causal": False, "window_right": 0}, "it takes a window only with a causal mask"),
    ],
)
def test_it_says_why_it_does_not_take_a_call(change: dict[str, object], reason: str) -> None:
    problem = dataclasses.replace(PROBLEM, **change)  # type: ignore[arg-type]
    refusal = hopper.why_not(problem, H200)
    assert refusal is not None
    assert reason in refusal
    assert hopper.choose(problem, H200) is None
    with pytest.raises(InputError):
        hopper.check(problem, configs.HopperBackward(64, True))


def test_other_gpus_and_older_compilers_take_the_portable_kernels() -> None:
    query = torch.empty(2, 4, 300, 64, dtype=torch.bfloat16, device="meta")
    assert explain(query, query, query, device=H200).kernel is GradientKind.HOPPER
    for device in (
        dataclasses.replace(H200, architecture="sm_100"),
        dataclasses.replace(H200, nvrtc=(12, 8)),
    ):
        assert explain(query, query, query, device=device).kernel is GradientKind.PORTABLE


def test_tiles_fit_and_the_gradients_of_their_rows_are_whole_pieces() -> None:
    for tile in configs.all_configurations():
        check_block(repr(tile), "sm_90", tile.threads, tile.shared_bytes)
        assert tile.piece_floats == 64 * (tile.block_m if tile.wide else 64)


def test_arguments_have_the_size_of_the_kernels_structs() -> None:
    """Counted in the sources: pointers and 64-bit fields, then 32-bit ones."""
    for source, struct, size in (
        ("attention_backward_prepare.cu", "Parameters", wgmma.PREPARE_BYTES),
        ("attention_backward_convert.cu", "Parameters", hopper._CONVERT.size + hopper._CONVERT_REST.size),
    ):
        assert _struct_bytes(source, struct) == size


def _struct_bytes(source: str, struct: str) -> int:
    text = re.sub(r"//[^\n]*", "", (KERNEL_DIRECTORY / source).read_text())
    body = text[text.index(f"struct {struct} {{") :]
    total = 0
    for declaration in body[body.index("{") + 1 : body.index("};")].split(";"):
        if not declaration.strip():
            continue
        wide = "*" in declaration or "int64" in declaration
        array = re.search(r"\[(\d+)\]", declaration)
        total += (8 if wide else 4) * (int(array[1]) if array else declaration.count(",") + 1)
    return -(-total // 8) * 8


@pytest.mark.parametrize(
    ("tile", "rows", "head_dim", "heads"),
    [
        (configs.HopperBackward(128, False, staggered=True), 512, 128, 64),
        (configs.HopperBackward(128, False, wide=True), 2048, 128, 16),
        (configs.HopperBackward(128, False, wide=True), 4096, 128, 8),
        (configs.HopperBackward(64, False), 16383, 64, 8),
        (configs.HopperBackward(64, False), 16384, 64, 4),
        (configs.HopperBackward(128, True, wide=True), 16384, 128, 8),
        (configs.HopperBackward(64, True, converts=True), 16384, 64, 16),
    ],
)
def test_heads_side_by_side(tile: configs.HopperBackward, rows: int, head_dim: int, heads: int) -> None:
    assert configs.key_heads_per_section(tile, rows, head_dim) == heads
