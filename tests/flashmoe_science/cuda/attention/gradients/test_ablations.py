"""The Hopper kernels of attention backward without a part of their work, on the CPU: they end, and what they give
differs from the whole kernel's as it should.

An arrival too many ends the emulation, one too few would never end it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention_backward import Three, assert_gradients, backward_case
from emulated import NEEDS_COMPILER
from emulated_hopper_backward import emulate

from flashmoe_science.configs.ablation import Ablation
from flashmoe_science.configs.attention.backward_hopper import HopperBackward
from flashmoe_science.configs.attention.backward_short import ShortBackward
from flashmoe_science.configs.attention.backward_two_pass import TwoPassBackward
from flashmoe_science.cuda.attention.gradients import hopper, short, two_pass
from flashmoe_science.cuda.attention.gradients.backward import _problem
from flashmoe_science.cuda.attention.problem import strides_of
from flashmoe_science.gradients import Needs
from flashmoe_science.jit.nvrtc import CudaKernel, compile_kernel
from problems import H200

MODULES = {HopperBackward: hopper, ShortBackward: short, TwoPassBackward: two_pass}
CAUSAL = [
    HopperBackward(64, True, converts=True),
    HopperBackward(64, True),
    HopperBackward(128, True, converts=True),
    HopperBackward(128, True, wide=True),
    ShortBackward(True),
    TwoPassBackward(192, True),
    TwoPassBackward(256, True),
]
FULL = [
    HopperBackward(64, False),
    HopperBackward(128, False, staggered=True),
    HopperBackward(128, False, wide=True),
    ShortBackward(False),
    TwoPassBackward(192, False),
    TwoPassBackward(256, False),
]


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)


def gradients(tile: Any, ablation: Ablation, lengths: tuple[int, int] = (330, 300), blocks: int = 3) -> Three:
    """Those of the whole kernel are right. ``blocks``: that a GPU runs at a time."""
    seqlen_q, seqlen_k = lengths
    torch.manual_seed(0)
    query, grad_output = (torch.randn(1, 2, seqlen_q, tile.head_dim).bfloat16() for _ in range(2))
    key, value = (torch.randn(1, 2, seqlen_k, tile.head_dim).bfloat16() for _ in range(2))
    case = backward_case(query, key, value, grad_output, causal=tile.causal)
    problem = _problem(
        (query, key, value, case.output),
        strides_of("grad_output", grad_output),
        tile.causal,
        None,
        Needs(True, True, True),
    )
    configuration = dataclasses.replace(tile, ablation=ablation)
    planned = MODULES[type(tile)].plan(  # type: ignore[attr-defined]
        problem, configuration, dataclasses.replace(H200, multiprocessors=blocks)
    )
    workspace = torch.full((planned.workspace_bytes + 256,), 0xFF, dtype=torch.uint8)
    results = tuple(torch.full_like(tensor, torch.nan) for tensor in (query, key, value))
    given = (query, key, value, case.output, grad_output, case.lse)
    of_workspace = (-(-workspace.data_ptr() // 256) * 256,) if planned.workspace_bytes else ()
    planned.launch(
        *(tensor.data_ptr() for tensor in given), 0, *(each.data_ptr() for each in results), *of_workspace, 0
    )
    if ablation is Ablation.NONE:
        assert_gradients(case, results)
    return results


def differ(one: Three, other: Three) -> tuple[bool, ...]:
    return tuple(not torch.equal(*pair) for pair in zip(one, other, strict=True))


@NEEDS_COMPILER
@pytest.mark.parametrize("tile", CAUSAL, ids=repr)
@pytest.mark.parametrize("part", [Ablation.EXPONENTIALS, Ablation.MASK, Ablation.LOADS])
def test_every_gradient_is_wrong_without_a_part(tile: Any, part: Ablation) -> None:
    assert differ(gradients(tile, part), gradients(tile, Ablation.NONE)) == (True, True, True)


@NEEDS_COMPILER
@pytest.mark.parametrize("tile", FULL, ids=repr)
@pytest.mark.parametrize("part", [Ablation.EXPONENTIALS, Ablation.LOADS])
def test_so_it_is_without_a_mask_to_leave_out(tile: Any, part: Ablation) -> None:
    assert differ(gradients(tile, part), gradients(tile, Ablation.NONE)) == (True, True, True)


@NEEDS_COMPILER
@pytest.mark.parametrize("tile", [*CAUSAL, *FULL], ids=repr)
def test_what_fills_the_stages_once_is_loaded(tile: Any) -> None:
    few = (60, 64)
    assert differ(gradients(tile, Ablation.LOADS, few), gradients(tile, Ablation.NONE, few)) == (False,) * 3


@NEEDS_COMPILER
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(
    "tile", [tile for tile in (*CAUSAL, *FULL) if isinstance(tile, HopperBackward)], ids=repr
)
def test_sums_are_those_of_the_query_s_gradient(tile: HopperBackward, blocks: int) -> None:
    """No block waits for a turn, and what writes the gradient does not wait for sums."""
    if tile.staggered:
        blocks = 3  # as many as tiles of a head, which wait for each other
    without = gradients(tile, Ablation.SUMS, blocks=blocks)
    assert differ(without, gradients(tile, Ablation.NONE, blocks=blocks)) == (True, False, False)


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("tile", [*CAUSAL, *FULL], ids=repr)
def test_no_kernel_without_a_part_has_a_defect(tile: Any) -> None:
    """No spilt register, no product that is serialised."""
    for part in Ablation:
        for kernel in kernels(dataclasses.replace(tile, ablation=part)):
            assert part is Ablation.NONE or kernel.macros["ABLATE"] == part.value
            compile_kernel(kernel)


def kernels(tile: Any) -> tuple[CudaKernel, ...]:
    if isinstance(tile, HopperBackward):
        return (hopper.main_kernel(tile, torch.bfloat16),)
    if isinstance(tile, ShortBackward):
        return (short.kernel(tile, torch.bfloat16),)
    return two_pass.key_value_kernel(tile, torch.bfloat16), two_pass.query_kernel(tile, torch.bfloat16)
