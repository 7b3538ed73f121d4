"""Parts are judged block by block: one that is off by some percent is found and named, whatever the others are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cudadent42.correctness import blocks as module
from cudadent42.correctness.blocks import find_parts, nearest_block, over_bounds, part_errors
from cudadent42.model.records import Compared, ErrorNorms, PartError
from cudadent42.operations.interface import Blocks

FLOOR = ErrorNorms(0.0, 0.001, 0.002)
COUNT, ROWS, WIDTH = 6, 3, 8


def result() -> Tensor:
    """A part of one row a block, and one of three."""
    generator = torch.Generator().manual_seed(0)
    rows = COUNT + COUNT * ROWS
    return torch.randn((rows, WIDTH), generator=generator, dtype=torch.float64)


def parts_of(limit: float, limit_of_all: float = 1e9) -> tuple[Blocks, Blocks]:
    limits = torch.full((COUNT,), limit, dtype=torch.float64)
    return (
        Blocks("hidden_states", "token", 0, 1, limits, limit_of_all),
        Blocks("w2", "expert", COUNT, ROWS, limits, limit_of_all),
    )


def judged(
    blocks: tuple[Blocks, ...], right: Tensor, wrong: Tensor, pytorch: Tensor | None = None
) -> tuple[PartError, ...]:
    parts = find_parts(blocks, right, right if pytorch is None else pytorch, 2.0, FLOOR)
    return part_errors(parts, right, wrong)


@pytest.mark.parametrize("entries", [1, 1 << 26])
def test_the_block_that_is_off_is_named(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ENTRIES", entries)
    right = result()
    wrong = right.clone()
    wrong[COUNT + 4 * ROWS : COUNT + 5 * ROWS] *= 1.03
    of_tokens, of_experts = judged(parts_of(0.01), right, wrong)
    assert (of_tokens.of_block, of_tokens.of_all.error) == (Compared(0.0, 0.0, of_tokens.of_block.bound), 0.0)
    assert (of_experts.part, of_experts.owner, of_experts.block) == ("w2", "expert", 4)
    assert of_experts.of_block.error == pytest.approx(0.03)
    assert not of_experts.of_block.within
    assert of_experts.of_all.within
    assert nearest_block((of_tokens, of_experts)) == of_experts.of_block
    (words,) = over_bounds((of_tokens, of_experts))
    assert words.startswith("error 0.03 over the bound 0.0")
    assert words.endswith("in w2 of expert 4")


def test_all_of_a_part_have_a_bound_of_their_own() -> None:
    right = result()
    wrong = right.clone()
    wrong[COUNT:] *= 1.01
    size = float(right[COUNT:].norm())
    passed, failed = (judged(parts_of(1.0, share * size), right, wrong)[1] for share in (0.011, 0.009))
    assert passed.of_all.within
    assert not failed.of_all.within
    assert failed.of_block.within
    assert failed.of_all == Compared(pytest.approx(0.01), 0.0, pytest.approx(0.009))
    assert [line.endswith("in all of w2") for line in over_bounds([failed])] == [True]


def test_twice_pytorchs_error_in_a_block_is_allowed_there_alone() -> None:
    right = result()
    pytorch = right.clone()
    pytorch[2] *= 1.02
    for row, factor, passes in ((2, 1.041, True), (2, 1.043, False), (3, 1.041, False), (3, 1.0019, True)):
        wrong = right.clone()
        wrong[row] *= factor
        of_tokens, _ = judged(parts_of(1e-9, 1e9), right, wrong, pytorch)
        assert of_tokens.of_block.within == passes, (row, factor)


def test_what_is_no_number_does_not_count() -> None:
    right = result()
    right[1, 3], right[COUNT, 0] = math.nan, math.inf
    wrong = right * 1.5
    of_tokens, of_experts = judged(parts_of(1e-9), right, wrong)
    assert of_tokens.of_block.error == pytest.approx(0.5)
    assert of_experts.of_all.error == pytest.approx(0.5)


def test_of_a_part_that_is_zero_nothing_is_left() -> None:
    right = result()
    right[:COUNT] = 0.0
    of_tokens, _ = judged(parts_of(1.0), right, right)
    assert of_tokens.of_block == of_tokens.of_all == Compared(0.0, 0.0, 0.0)
    assert of_tokens.of_block.within
    assert of_tokens.of_block.share == 0.0
    wrong = right.clone()
    wrong[1, 1] = 1e-30
    of_tokens, _ = judged(parts_of(1.0), right, wrong)
    assert of_tokens.of_all == Compared(math.inf, 0.0, 0.0)
    assert not of_tokens.of_all.within
    assert of_tokens.of_all.share == math.inf


def test_no_blocks_are_no_part() -> None:
    none = torch.zeros(0, dtype=torch.float64)
    assert find_parts([Blocks("w2", "expert", 0, 3, none, 0.0)], result(), result(), 2.0, FLOOR) == ()
