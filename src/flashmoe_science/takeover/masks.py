"""Masks that say no more than which keys of a sequence are padding, recognised without reading them twice."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

Range = tuple[int, int]
"""First key that is seen, and the one after the last."""


@dataclass(frozen=True)
class _Reading:
    version: int
    """Of the mask's contents when it was read."""
    ranges: tuple[Range, ...] | None


_readings: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of masks on a GPU, whose contents have to be waited for: once for each mask, not once for each layer."""


def key_ranges(mask: torch.Tensor, scores: tuple[int, int, int, int]) -> tuple[Range, ...] | str:
    """The one range of keys that each sequence of the batch sees, or why the mask is not of that kind.

    A key-padding mask is one of booleans with the same row for all heads and queries (of size 1 there, or expanded),
    and each row a run of True. What is asked of shape and strides costs nothing; the contents of a mask on a GPU are
    waited for once, and remembered while the mask lives and is not written to.

    Args:
        mask: a dense tensor, True where a key is seen; broadcasts to the scores, or PyTorch refuses it.
        scores: (batch, heads, seqlen_q, seqlen_k).
    """
    if mask.dtype is not torch.bool:
        return "a mask that is added"
    rows = _rows(mask, scores)
    if rows is None:
        return "a mask with rows of its own for heads or queries"
    ranges = _read(rows) if mask.is_cpu else _read_once(mask, rows)
    if ranges is None:
        return "a mask with gaps"
    if any(start == stop for start, stop in ranges):
        return "a mask that hides all keys of a sequence"
    return ranges


def _rows(mask: torch.Tensor, scores: tuple[int, int, int, int]) -> torch.Tensor | None:
    """(batch or 1, seqlen_k), or None if heads or queries have rows of their own, or another number of them."""
    if not 2 <= mask.dim() <= 4 or mask.shape[-1] != scores[3]:
        return None
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    strides = (0,) * (4 - mask.dim()) + mask.stride()
    if any(shape[each] not in (1, scores[each]) for each in (0, 1, 2)):
        return None
    if any(shape[each] != 1 and strides[each] != 0 for each in (1, 2)):
        return None
    return mask.as_strided((shape[0], scores[3]), (strides[0], strides[3]))


def _read_once(mask: torch.Tensor, rows: torch.Tensor) -> tuple[Range, ...] | None:
    if mask.is_inference():
        return None  # its writes are not counted
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # at each replay it may say something else
    reading = _readings.get(mask)  # type: ignore[no-untyped-call]
    if reading is None or reading.version != mask._version:
        reading = _readings[mask] = _Reading(mask._version, _read(rows))
    ranges: tuple[Range, ...] | None = reading.ranges
    return ranges


def _read(rows: torch.Tensor) -> tuple[Range, ...] | None:
    """None if a row has gaps."""
    seen = rows.to(torch.uint8)
    keys = rows.shape[1]
    # The first of equal ones is what argmax gives.
    first, last = seen.argmax(1), keys - 1 - seen.flip(1).argmax(1)
    numbers = torch.stack((first, last, seen.sum(1, dtype=torch.int64)))
    ranges = []
    for start, end, count in zip(*numbers.tolist(), strict=True):
        if count and end - start + 1 != count:
            return None
        ranges.append((start, start + count))
    return tuple(ranges)


def uniform(ranges: tuple[Range, ...]) -> bool:
    """Whether all sequences see the same keys."""
    return all(one == other for one, other in itertools.pairwise(ranges))
