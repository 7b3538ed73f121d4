"""Inputs and outputs of calls in memory that two processes share."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 256
"""Of tensors, in bytes, as PyTorch's allocators give them."""


@dataclass(frozen=True)
class Slot:
    """One call's."""

    inputs: tuple[Tensor, ...]
    output: Tensor


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """That they take in a slot, one behind the other."""
    return sum(map(_room, tensors))


def slots(memory: mmap.mmap, count: int, inputs: Sequence[Tensor], output: Tensor) -> list[Slot]:
    """``count`` of them, with tensors of these shapes and dtypes, dense, on the CPU."""
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    offset = 0
    all_slots = []
    for _ in range(count):
        tensors = []
        for like in (*inputs, output):
            size = like.numel() * like.element_size()
            tensors.append(whole[offset : offset + size].view(like.dtype).view(like.shape))
            offset += _room(like)
        all_slots.append(Slot(tuple(tensors[:-1]), tensors[-1]))
    return all_slots


def _room(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
