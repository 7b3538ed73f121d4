"""The Hopper kernels of attention backward on the CPU: whole calls of them.

Fences and waits for products do nothing here: that none is lacking is for tests on a GPU to show.
"""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from attention_backward import assert_gradients, backward_case
from backward_kernels import aligned
from emulated import NEEDS_COMPILER
from emulated_hopper_backward import OF_PRIORITY, emulate

from flashmoe_science.configs.attention.backward_hopper import HopperBackward
from flashmoe_science.cuda.attention.gradients import hopper
from flashmoe_science.cuda.attention.gradients.backward import _prepare, _problem
from flashmoe_science.cuda.attention.problem import strides_of
from flashmoe_science.gradients import Needs
from problems import H200


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("tile", "head_dim", "heads", "lengths", "blocks"),
    [
        (HopperBackward(64, False), 64, (1, 1), (64, 77), 1),
        (HopperBackward(128, False), 120, (2, 2), (70, 260), 1),
        (HopperBackward(128, False, wide=True), 128, (2, 1), (200, 300), 2),
        (HopperBackward(128, False, wide=True), 104, (2, 2), (81, 130), 1),
        (HopperBackward(128, False, staggered=True, wide=True), 120, (2, 1), (330, 300), 3),
        (HopperBackward(128, True, wide=True), 128, (4, 2), (130, 300), 1),
        (HopperBackward(128, True, wide=True), 96, (1, 1), (300, 200), 2),
        (HopperBackward(64, True), 64, (3, 3), (200, 300), 1),
        (HopperBackward(128, True), 128, (4, 2), (130, 300), 1),
        (HopperBackward(64, True, converts=True), 64, (2, 2), (200, 300), 1),
        (HopperBackward(64, True, converts=True), 64, (2, 1), (300, 100), 1),
        (HopperBackward(128, True, converts=True), 128, (4, 2), (130, 300), 2),
        (HopperBackward(128, False, staggered=True), 128, (2, 1), (130, 300), 3),
        (HopperBackward(128, False, staggered=True), 72, (1, 1), (300, 450), 4),
        (HopperBackward(128, False, staggered=True), 128, (2, 2), (60, 300), 5),
    ],
)
def test_gradients(
    tile: HopperBackward, head_dim: int, heads: tuple[int, int], lengths: tuple[int, int], blocks: int
) -> None:
    """Bulk copies take long to be complete, so that a phase that is waited for too late is seen.

    ``blocks``: of the main kernel, which run side by side.
    """
    check_gradients(tile, head_dim, heads, lengths, blocks, stream=0)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("tile", "head_dim", "heads", "lengths"),
    [
        (HopperBackward(64, False), 64, (2, 1), (130, 300)),
        (HopperBackward(128, True, converts=True), 128, (2, 2), (130, 300)),
        (HopperBackward(128, False, wide=True), 128, (2, 1), (200, 300)),
    ],
)
def test_a_block_that_is_alone_on_the_gpu_waits_for_no_other(
    tile: HopperBackward, head_dim: int, heads: tuple[int, int], lengths: tuple[int, int]
) -> None:
    check_gradients(tile, head_dim, heads, lengths, 3, stream=OF_PRIORITY)


@NEEDS_COMPILER
@pytest.mark.parametrize("window", [0, 1, 30, 64, 100, 126, 127, 128, 129, 1000])
@pytest.mark.parametrize(
    ("head_dim", "heads", "lengths", "blocks", "stream"),
    [
        (64, (4, 2), (300, 300), 3, 0),
        (64, (2, 2), (330, 520), 2, OF_PRIORITY),
        (128, (2, 1), (200, 200), 2, 0),
        (120, (2, 1), (130, 300), 1, 0),
    ],
)
def test_windows(
    window: int, head_dim: int, heads: tuple[int, int], lengths: tuple[int, int], blocks: int, stream: int
) -> None:
    tile = HopperBackward(64 if head_dim <= 64 else 128, True, converts=True, window=True)
    check_gradients(tile, head_dim, heads, lengths, blocks, stream, window)


@NEEDS_COMPILER
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("lengths", "window", "blocks"),
    [
        ((500, 200), 40, 3),  # rows without keys
        ((60, 600), 20, 2),  # keys without rows: four blocks of them come first
        ((1, 700), 300, 4),
        ((130, 520), 0, 1),
    ],
)
@pytest.mark.parametrize("converts", [False, True])
def test_windows_beside_rows_or_keys(
    converts: bool, head_dim: int, lengths: tuple[int, int], window: int, blocks: int
) -> None:
    tile = HopperBackward(head_dim, True, converts=converts, window=True)
    check_gradients(tile, head_dim, (2, 1), lengths, blocks, 0, window)


def check_gradients(
    tile: HopperBackward,
    head_dim: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    blocks: int,
    stream: int,
    window: int = -1,
) -> None:
    (of_query, of_key), (seqlen_q, seqlen_k), causal = heads, lengths, tile.causal
    torch.manual_seed(0)
    query, grad_output = (torch.randn(1, of_query, seqlen_q, head_dim).bfloat16() for _ in range(2))
    key, value = (torch.randn(1, of_key, seqlen_k, head_dim).bfloat16() for _ in range(2))
    case = backward_case(
        *(query, key, value, grad_output),
        causal=causal,
        grad_lse=torch.randn(1, of_query, seqlen_q),
        window=(window, -1),
    )
    assert case.grad_lse is not None
    problem = _problem(
        (query, key, value, case.output),
        strides_of("grad_output", grad_output),
        causal,
        None,
        Needs(True, True, True),
        window=(window, -1),
    )
    planned = hopper.plan(problem, tile, dataclasses.replace(H200, multiprocessors=blocks))
    workspace = torch.full((planned.workspace_bytes + 256,), 0xFF, dtype=torch.uint8)
    gradients = tuple(torch.full_like(tensor, torch.nan) for tensor in (query, key, value))
    given = (query, key, value, case.output, grad_output, case.lse, case.grad_lse, *gradients)
    planned.launch(*(tensor.data_ptr() for tensor in given), -(-workspace.data_ptr() // 256) * 256, stream)
    assert_gradients(case, gradients)


@NEEDS_COMPILER
def test_a_gradient_of_the_output_that_begins_anywhere_keeps_its_gaps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a part of a wider tensor, which autograd hands over. Its copy has the strides that the plan holds."""
    module = sys.modules[_prepare.__module__]  # its package has a function of the same name
    monkeypatch.setattr(module, "raw_stream", lambda device: 0)
    monkeypatch.setattr(module, "cuda_allocator", lambda: aligned)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 100, 64).bfloat16() for _ in range(3))
    wide = torch.randn(1, 2, 100, 72).bfloat16()
    case = backward_case(query, key, value, wide[..., 4:68].contiguous(), causal=False)
    grad_output = wide[..., 4:68]
    assert grad_output.data_ptr() % 16 == 8
    problem = _problem(
        (query, key, value, case.output),
        strides_of("grad_output", grad_output),
        False,
        None,
        Needs(True, True, True),
    )
    plan = hopper.plan(problem, HopperBackward(64, False), dataclasses.replace(H200, multiprocessors=1))
    layouts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in (query, key, value)]
    call = _prepare(layouts, plan, 0, copied=False, with_lse=False)
    assert_gradients(case, call(query, key, value, case.output, case.lse, grad_output))


@NEEDS_COMPILER
@pytest.mark.parametrize("which", ["query", "value"])
def test_nan_spreads_as_far_as_it_must(which: str) -> None:
    """One row of a query, or one entry of a value: what the lab's hard inputs hold, in the kernel that takes them."""
    torch.manual_seed(0)
    query, key, value, grad_output = (torch.randn(1, 2, 200, 64).bfloat16() for _ in range(4))
    if which == "query":
        query[0, 0, 17] = torch.nan
    else:
        value[0, 0, 90, 5] = torch.nan
    case = backward_case(query, key, value, grad_output, causal=False)
    problem = _problem(
        (query, key, value, case.output),
        strides_of("grad_output", grad_output),
        False,
        None,
        Needs(True, True, True),
    )
    planned = hopper.plan(problem, HopperBackward(64, False), dataclasses.replace(H200, multiprocessors=1))
    workspace = torch.full((planned.workspace_bytes + 256,), 0xFF, dtype=torch.uint8)
    gradients = tuple(torch.zeros_like(tensor) for tensor in (query, key, value))
    given = (query, key, value, case.output, grad_output, case.lse)
    addresses = [tensor.data_ptr() for tensor in given]
    planned.launch(
        *addresses, 0, *(each.data_ptr() for each in gradients), -(-workspace.data_ptr() // 256) * 256, 0
    )
    of_query, of_key, of_value = (gradient.isnan() for gradient in gradients)
    assert not any(spread[0, 1].any() for spread in (of_query, of_key, of_value))
    assert of_key[0, 0].all()
    if which == "query":
        assert of_query[0, 0, 17].all()
        assert not of_query[0, 0, :17].any()
        assert not of_query[0, 0, 18:].any()
        assert of_value[0, 0].all()
    else:
        assert of_query[0, 0].all()
        assert not of_value[0, 0].any()
