"""Parts of a result that are judged block by block: how far off each block is, and how far it may be.

A norm over all of a result hides one token's row or one expert's gradient that is off by some percent. So each block
has a bound: some times what rounding is expected to leave there, or twice PyTorch's own error where that is more. A
whole part has a closer one, as errors of many blocks add to what is expected of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cudadent42.model.records import Compared, ErrorNorms, PartError
from cudadent42.operations.interface import Blocks

_CHUNK_ENTRIES = 1 << 26
"""Of a part, compared in float64 at a time."""

_SMALLEST = 1e-3
"""Blocks whose RMS is below this share of their part's are told relative to that; what decides is their bound."""


@dataclass(frozen=True)
class Part:
    """One part of a result: what is right, what PyTorch makes of it, and what is allowed. By block, each the root of a
    sum of squares."""

    blocks: Blocks
    size: Tensor
    """Of the float64 result."""
    own: Tensor
    """Of PyTorch's error."""
    limit: Tensor
    """Of the error that a block may have."""
    limit_of_all: float
    """Of the error that all may have together."""


def find_parts(
    blocks: Sequence[Blocks], reference: Tensor, pytorch: Tensor, factor: float, floor: ErrorNorms
) -> tuple[Part, ...]:
    """``factor``: how many times PyTorch's error is allowed in any case, and ``floor`` what is on top of that, relative
    to the result."""

    def part(each: Blocks) -> Part:
        size, own = _sizes(each, reference), _sizes(each, reference, pytorch)
        limit = each.limit.maximum(factor * own + floor.worst_row * size)
        of_all = factor * _root(own) + floor.rms * _root(size)
        return Part(each, size, own, limit, max(of_all, each.limit_of_all))

    return tuple(part(each) for each in blocks if len(each.limit))


def part_errors(parts: Sequence[Part], reference: Tensor, result: Tensor) -> tuple[PartError, ...]:
    """Of each part, the error of all, and of the block whose error is the largest share of its bound."""

    def errors(part: Part) -> PartError:
        error = _sizes(part.blocks, reference, result)
        block = int((error / part.limit).nan_to_num(0.0).argmax())
        size = max(float(part.size[block]), _SMALLEST * _root(part.size) / len(part.size) ** 0.5)
        of_block = (float(error[block]), float(part.own[block]), float(part.limit[block]))
        of_all = (_root(error), _root(part.own), part.limit_of_all)
        return PartError(
            part.blocks.part,
            part.blocks.owner,
            block,
            _relative(of_block, size),
            _relative(of_all, _root(part.size)),
        )

    return tuple(errors(part) for part in parts)


def nearest_block(errors: Sequence[PartError]) -> Compared:
    """Of all parts, that which is nearest its bound or the furthest over it."""
    return max((each.of_block for each in errors), key=lambda each: each.share)


def over_bounds(errors: Sequence[PartError]) -> Iterator[str]:
    """In words, what is over a bound."""
    for each in errors:
        if not each.of_all.within:
            yield f"RMS {_words(each.of_all)} in all of {each.part}"
        if not each.of_block.within:
            yield f"{_words(each.of_block)} in {each.part} of {each.owner} {each.block}"


def _words(compared: Compared) -> str:
    return (
        f"error {compared.error:.3g} over the bound {compared.bound:.3g} "
        f"(PyTorch {compared.reference_error:.3g})"
    )


def _sizes(blocks: Blocks, reference: Tensor, other: Tensor | None = None) -> Tensor:
    """(blocks,) of the reference, or of how far another result is off; places that are no numbers do not count."""
    count = len(blocks.limit)
    entries = slice(blocks.first, blocks.first + blocks.rows * count)
    exact, beside = (
        None if each is None else each[entries].reshape(count, blocks.rows, each.shape[1])
        for each in (reference, other)
    )
    assert exact is not None
    made = []
    at_a_time = max(1, _CHUNK_ENTRIES // max(1, blocks.rows * exact.shape[2]))
    for begin in range(0, count, at_a_time):
        chunk = slice(begin, begin + at_a_time)
        values = exact[chunk] if beside is None else beside[chunk].double() - exact[chunk]
        made.append(values.nan_to_num(0.0, 0.0, 0.0).square().sum(dim=(1, 2)))
    return torch.cat(made).sqrt()


def _root(sizes: Tensor) -> float:
    return float(sizes.square().sum().sqrt())


def _relative(compared: tuple[float, float, float], size: float) -> Compared:
    if size > 0.0:
        return Compared(*(each / size for each in compared))
    error, own, _ = (0.0 if each == 0.0 else math.inf for each in compared)
    return Compared(error, own, 0.0)  # of a gradient that is zero, nothing may be left
