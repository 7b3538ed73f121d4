"""What attention over sequences of any lengths takes as its options: each checked by itself."""

from __future__ import annotations

import numbers
from collections.abc import Mapping

import numpy as np
import torch

from flashmoe_science.arguments import is_finite, shown
from flashmoe_science.errors import InputError

SPLIT_STEP = 128
"""`split_keys` is a multiple of this: no kernel's tile of keys is larger."""
_WIDEST_WINDOW = 2**31 - 1
"""Lengths are int32: a side so wide hides nothing, and no kernel's arithmetic overflows by it."""
_LARGEST_CHUNK = 2**30


def check_window(window: object) -> tuple[int, int]:
    """(left, right) as Python integers; InputError unless it is such a pair."""
    if (
        isinstance(window, tuple)
        and len(window) == 2
        and all(
            isinstance(side, (int, np.integer)) and not isinstance(side, bool) and side >= -1
            for side in window
        )
    ):
        return min(int(window[0]), _WIDEST_WINDOW), min(int(window[1]), _WIDEST_WINDOW)
    raise InputError(
        f"window is {shown(window)}; expected (left, right), each the number of keys that are seen on that side beside "
        "one's own, or -1 for all"
    )


def check_softmax_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The factor of the scores; InputError unless it is None or a number that float32 can work with."""
    if softmax_scale is None:
        return float(head_dim**-0.5)
    if is_finite(softmax_scale) and 1e-30 <= float(softmax_scale) <= 1e30:
        return float(softmax_scale)
    raise InputError(
        f"softmax_scale is {shown(softmax_scale)}; expected a number between 1e-30 and 1e30, or None for "
        "1/sqrt(head_dim)"
    )


def check_softcap(softcap: float) -> float:
    """As a Python float; InputError unless it is 0 or a cap that float32 can work with."""
    if is_finite(softcap) and (softcap == 0 or 1e-6 <= float(softcap) <= 1e6):
        return float(softcap)
    raise InputError(f"softcap is {shown(softcap)}; expected a number between 1e-6 and 1e6, or 0 for none")


def check_split(split_keys: int | None) -> int:
    """Keys of a part, 0 where any will do; InputError for anything else."""
    if split_keys is None:
        return 0
    if (
        isinstance(split_keys, numbers.Integral)
        and not isinstance(split_keys, bool)
        and split_keys > 0
        and split_keys % SPLIT_STEP == 0
    ):
        return int(split_keys)
    raise InputError(f"split_keys is {shown(split_keys)}; expected a multiple of {SPLIT_STEP}, or None")


def check_chunk(chunk: int) -> int:
    """As a Python integer; InputError unless it is a number of keys."""
    if isinstance(chunk, numbers.Integral) and not isinstance(chunk, bool) and 0 <= chunk <= _LARGEST_CHUNK:
        return int(chunk)
    raise InputError(
        f"chunk is {shown(chunk)}; expected a number of keys up to {_LARGEST_CHUNK}, or 0 for none"
    )


def check_tree(tree_mask: torch.Tensor, rows: int, positional: Mapping[str, bool]) -> None:
    """InputError unless it has a word for each of the query's rows, and nothing is given that goes by positions.

    Args:
        positional: by their names, whether options are given that a tree's rows, which have no positions, cannot take.
    """
    if tree_mask.dim() != 1 or tree_mask.dtype is not torch.int64:
        raise InputError(
            f"tree_mask is {tree_mask.dtype} with shape {tuple(tree_mask.shape)}; expected torch.int64 with shape "
            f"({rows},), a bit for each query of the row's sequence"
        )
    if tree_mask.shape[0] > 1 and tree_mask.stride(0) != 1:
        raise InputError("tree_mask is not contiguous; call .contiguous() on it")
    for name, given in positional.items():
        if given:
            raise InputError(
                f"tree_mask is given with {name}; expected neither or one: {name} goes by a row's position, which "
                "is not its depth in a tree"
            )
