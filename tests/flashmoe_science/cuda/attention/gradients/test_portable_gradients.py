"""The portable kernels of attention backward without a GPU: tiles, what is passed, and their source on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_backward import assert_gradients, backward_case
from emulated import NEEDS_COMPILER
from emulated_portable_backward import ONE_PASS, TILES, Emulation, case_of, problem_of
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_science.configs.attention import backward as configs
from flashmoe_science.configs.attention.backward import PortableBackward
from flashmoe_science.cuda.attention.gradients import GradientKind, portable, select
from flashmoe_science.cuda.attention.gradients.backward import explain
from flashmoe_science.errors import InputError, NoKernelError
from flashmoe_science.gradients import Needs
from flashmoe_science.jit.limits import LIMITS, check_block
from flashmoe_science.jit.nvrtc import KERNEL_DIRECTORY
from problems import L4

BF16, FP16 = torch.bfloat16, torch.float16

# --- tiles


def test_every_architecture_has_tiles() -> None:
    assert set(configs.tuned_architectures()) == set(LIMITS)


@given(st.sampled_from(configs.tuned_architectures()), st.integers(1, 256))
def test_tiles_fit_and_are_built_ahead(architecture: str, head_dim: int) -> None:
    tiles = configs.configuration(architecture, head_dim)
    assert tiles in configs.all_configurations(architecture)
    for tile in (tiles.query, *tiles.key_tiles):
        assert tile.head_dim >= head_dim
        check_block(repr(tile), architecture, tile.threads, tile.shared_bytes)


def test_what_a_call_takes_is_among_what_is_built() -> None:
    for architecture in configs.tuned_architectures():
        labels = {kernel.label for kernel in portable.kernels(architecture)}
        for tiles in configs.all_configurations(architecture):
            assert portable.query_kernel(tiles.query, FP16, architecture).label in labels
            for tile in tiles.key_tiles:
                assert portable.key_value_kernel(tile, FP16, architecture).label in labels
        assert portable.statistics_kernel(FP16, architecture).label in labels


# --- choice and arguments


def test_choice() -> None:
    query = torch.empty(1, 4, 100, 72, dtype=BF16, device="meta")
    choice = explain(query, query, query, causal=True, device=L4)
    assert choice.kernel is GradientKind.PORTABLE
    assert choice.configuration == configs.configuration("sm_89", 72)
    with pytest.raises(NoKernelError, match=r"backward pass takes torch\.bfloat16 with head_dim 72 on sm_75"):
        explain(query, query, query, device=dataclasses.replace(L4, architecture="sm_75"))


@pytest.mark.parametrize(
    ("shape", "single"),
    [
        ((16, 32, 1024, 32), True),
        ((1, 16, 16384, 128), True),
        ((1, 1, 16384, 128), False),  # all blocks of keys of the one head side by side
        ((1, 4, 4096, 128), False),  # a quarter of them
        ((1, 16, 128, 32), False),  # fewer blocks than the GPU runs at a time
        ((16, 16, 1024, 128), False),  # fewer keys than with which one pass was faster
        ((16, 32, 1024, 64), False),  # no tile for one pass
    ],
)
def test_one_pass_where_blocks_of_a_head_do_not_wait(shape: tuple[int, ...], single: bool) -> None:
    query = torch.empty(shape, dtype=BF16, device="meta")
    device = dataclasses.replace(L4, architecture="sm_80", multiprocessors=108)
    choice = explain(query, query, query, device=device)
    expected = configs.configuration("sm_80", shape[-1])
    assert choice.configuration == (expected if single else dataclasses.replace(expected, single=None))


def test_a_kernel_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_CUDA_BACKWARD", "fast")
    with pytest.raises(InputError, match="FLASHMOE_CUDA_BACKWARD='fast' names no kernel"):
        select(problem_of(case_of()), L4)


def test_a_configuration_must_be_one_of_these_kernels_and_hold_the_head() -> None:
    problem = problem_of(case_of(head_dim=64))
    with pytest.raises(InputError, match="take a PortableBackward"):
        portable.check(problem, configs.configuration("sm_89", 64).query)
    with pytest.raises(InputError, match="head_dim is 64; expected at most the 32"):
        portable.check(problem, configs.configuration("sm_89", 32))


def test_fields_are_those_of_the_headers_struct_in_order() -> None:
    text = re.sub(r"//[^\n]*", "", (KERNEL_DIRECTORY / "backward/parameters.cuh").read_text())
    body = text[text.index("struct BackwardParameters {") :]
    body = body[body.index("{") + 1 : body.index("};")]
    names = [
        name.strip(" *")
        for declaration in body.split(";")
        if declaration.strip()
        for name in re.sub(r"^(const )?\w+\s*\*?", "", declaration.strip()).split(",")
    ]
    assert len(names[:14]) * 8 == portable.POINTERS.size
    case = case_of((37, 53), 32, heads=(4, 2))
    tile = configs.configuration("sm_89", 32).key_value
    passed = dict(zip(names[14:], portable.key_value_fields(problem_of(case), tile, L4), strict=True))
    assert (passed["seqlen_q"], passed["seqlen_k"], passed["head_dim"]) == (37, 53, 32)
    assert (passed["num_heads"], passed["heads_per_kv_head"], passed["num_slices"]) == (4, 2, 4)
    assert passed["causal_offset"] == 16
    assert passed["statistics_rows"] == 40
    assert passed["grad_value_row"] == 2 * 32
    assert passed["grad_output_head"] == 2 * 37 * 32
    assert passed["blocks_per_slice"] == -(-53 // tile.block_n)
    assert passed["scale_log2"] == pytest.approx(case.scale * math.log2(math.e))


@pytest.mark.parametrize(
    ("parts", "given", "packed"),
    [
        ((), (), (0, 0, 0, 0)),
        ((0, 0, 0, 0), (), (0, 0, 0, 0)),  # no rows
        ((10, 10), (4096,), (4096, 4352, 0, 0)),
        ((10, 300, 10, 10), (4096,), (4096, 4352, 4864, 5120)),
    ],
)
def test_parts_of_the_workspace_are_passed_on(
    parts: tuple[int, ...], given: tuple[int, ...], packed: tuple[int, ...]
) -> None:
    streams: list[int] = []
    launcher: Any = SimpleNamespace(buffer=ctypes.create_string_buffer(256), start=streams.append)
    launch, size = portable._in_order([launcher], parts)
    assert (size > 0) == bool(given)
    launch(*range(1, 11), *given, 7)
    assert portable.POINTERS.unpack_from(launcher.buffer) == (*range(1, 11), *packed)
    assert streams == [7]


# --- the kernels' source, on the CPU


@pytest.fixture(scope="module")
def emulation() -> Emulation:
    return Emulation()


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("tiles", TILES.values(), ids=list(TILES))
def test_gradients(emulation: Emulation, tiles: PortableBackward, dtype: torch.dtype) -> None:
    case = case_of((37, 70), dtype=dtype, grad_lse=True)
    assert_gradients(case, emulation.backward(case, tiles))


@NEEDS_COMPILER
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tiles", ONE_PASS)
def test_blocks_of_keys_wait_for_their_turns(emulation: Emulation, tiles: str, causal: bool) -> None:
    """Side by side they give the bits that they give one after another."""
    case = case_of((150, 130), causal=causal, heads=(4, 2))
    alone = emulation.backward(case, TILES[tiles])
    assert_gradients(case, alone)
    for one, other in zip(alone, emulation.backward(case, TILES[tiles], together=12), strict=True):
        assert one is not None
        assert torch.equal(one, other)  # type: ignore[arg-type]


@NEEDS_COMPILER
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 40), (40, 1), (64, 64), (33, 65)])
@pytest.mark.parametrize("tiles", ["operands in registers, two roles", *ONE_PASS])
def test_lengths(emulation: Emulation, tiles: str, lengths: tuple[int, int], causal: bool) -> None:
    case = case_of(lengths, causal=causal)
    assert_gradients(case, emulation.backward(case, TILES[tiles]))


@NEEDS_COMPILER
@pytest.mark.parametrize("tiles", ONE_PASS)
def test_keys_past_the_end_do_not_count(emulation: Emulation, tiles: str) -> None:
    """A log-sum-exp of about -1,400: keys past the end would have weights that are not finite."""
    case = case_of((50, 70), causal=False)
    query, key = (40 + case.query.float()).to(BF16), (-6 + 0.1 * case.key.float()).to(BF16)
    case = backward_case(
        query, key, case.value, case.grad_output, causal=False, scale=None, grad_lse=torch.zeros(2, 2, 50)
    )
    assert case.lse.max() < -1000
    assert_gradients(case, emulation.backward(case, TILES[tiles]))


@NEEDS_COMPILER
@pytest.mark.parametrize("tiles", [*ONE_PASS, "part of the operands in registers"])
def test_what_is_not_finite_reaches_all_that_see_it(emulation: Emulation, tiles: str) -> None:
    """Keys past the end see nothing, and leave nothing out of what others see."""
    case = case_of((50, 70), causal=False)
    case.grad_output[:, :, -5, 7] = math.nan
    _, _, of_value = emulation.backward(case, TILES[tiles])
    assert of_value is not None
    assert of_value[..., 7].isnan().all()
    assert of_value[..., :7].isfinite().all()


@NEEDS_COMPILER
@pytest.mark.parametrize("tiles", TILES.values(), ids=list(TILES))
@pytest.mark.parametrize("rows", [33, 113])
def test_rows_without_keys_get_zeros(emulation: Emulation, tiles: PortableBackward, rows: int) -> None:
    case = case_of((rows + 37, 37))
    case.grad_output[:, :, :rows] = math.nan  # of rows that see no key
    gradients = emulation.backward(case, tiles)
    assert gradients[0] is not None
    assert (gradients[0][:, :, :rows] == 0).all()
    clean = dataclasses.replace(case, grad_output=case.grad_output.nan_to_num(0.0))
    assert_gradients(clean, gradients)


@NEEDS_COMPILER
def test_no_rows_and_no_keys(emulation: Emulation) -> None:
    tiles = TILES["operands from shared memory, one role"]
    _, of_key, of_value = emulation.backward(case_of((0, 40)), tiles)
    assert of_key is not None
    assert of_value is not None
    assert (of_key == 0).all()
    assert (of_value == 0).all()
    of_query, _, _ = emulation.backward(case_of((40, 0)), tiles)
    assert of_query is not None
    assert (of_query == 0).all()


@NEEDS_COMPILER
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
@pytest.mark.parametrize("tiles", ["operands from shared memory, one role", "one pass, two roles"])
def test_scales(emulation: Emulation, tiles: str, scale: float) -> None:
    case = case_of(scale=scale)
    assert_gradients(case, emulation.backward(case, TILES[tiles]))


@NEEDS_COMPILER
@pytest.mark.parametrize("factor", [2.0**10, 2.0**-14])
def test_large_and_small_gradients_in_float16(emulation: Emulation, factor: float) -> None:
    case = case_of(dtype=FP16, factor=factor)
    assert_gradients(case, emulation.backward(case, TILES["operands in registers, two roles"]))


@NEEDS_COMPILER
@pytest.mark.parametrize("tiles", ["operands from shared memory, one role", *ONE_PASS])
def test_padded_head_dim_and_grouped_heads(emulation: Emulation, tiles: str) -> None:
    case = case_of((37, 53), 24, heads=(6, 2))
    assert_gradients(case, emulation.backward(case, TILES[tiles]))


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "needs",
    [
        Needs(True, False, False),
        Needs(False, True, True),
        Needs(False, True, False),
        Needs(True, False, True),
    ],
)
def test_only_what_is_needed(emulation: Emulation, needs: Needs) -> None:
    case = case_of(grad_lse=True)
    for tiles in TILES.values():
        gradients = emulation.backward(case, tiles, needs)
        assert [gradient is not None for gradient in gradients] == list(needs)
        assert_gradients(case, gradients)


@NEEDS_COMPILER
@pytest.mark.parametrize("tiles", TILES.values(), ids=list(TILES))
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_a_row_does_not_see_reaches_no_gradient_of_it(
    emulation: Emulation, tiles: PortableBackward, bad: float
) -> None:
    """Row i sees keys up to i + 3. What is not finite lies in the last key and value, seen by the last row alone."""
    case = case_of((47, 50))
    clean = emulation.backward(case, tiles)
    last_key = case.key.clone()
    last_key[:, :, -1, 5] = bad
    last_value = case.value.clone()
    last_value[:, :, -1, 5] = bad
    for spoilt in (dataclasses.replace(case, key=last_key), dataclasses.replace(case, value=last_value)):
        of_query, _, _ = emulation.backward(spoilt, tiles)
        assert of_query is not None
        assert clean[0] is not None
        assert torch.equal(of_query[:, :, :-1], clean[0][:, :, :-1])
        assert not of_query[:, :, -1].isfinite().all()


@NEEDS_COMPILER
@pytest.mark.parametrize("tiles", TILES.values(), ids=list(TILES))
def test_what_no_key_after_a_row_sees_of_it(emulation: Emulation, tiles: PortableBackward) -> None:
    """A row that is not a number spoils the keys that it sees, and none after them."""
    case = case_of((50, 50))
    clean = emulation.backward(case, tiles)
    spoilt_query, spoilt_gradient = case.query.clone(), case.grad_output.clone()
    spoilt_query[:, :, 20, 7] = math.nan
    spoilt_gradient[:, :, 20, 7] = math.nan
    for spoilt in (
        dataclasses.replace(case, query=spoilt_query),
        dataclasses.replace(case, grad_output=spoilt_gradient),
    ):
        gradients = emulation.backward(spoilt, tiles)
        for got, before in zip(gradients[1:], clean[1:], strict=True):
            assert got is not None
            assert before is not None
            assert torch.equal(got[:, :, 21:], before[:, :, 21:])
        assert gradients[1] is not None
        assert gradients[1][:, :, :21].isnan().any(-1).all()
