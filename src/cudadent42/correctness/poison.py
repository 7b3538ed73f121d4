"""Freed memory that is full of NaN: a result that a call did not write is then NaN, and not the right answer of whoever
ran before."""

from __future__ import annotations

from cudadent42.operations.interface import Inputs

POISON_BLOCKS = 4
"""Freed NaN blocks of each buffer's size that an implementation's allocation can land on."""


def poison_freed_memory(inputs: Inputs) -> None:
    """Fills and frees blocks of the output's and the scratch memory's sizes.

    PyTorch's CUDA allocator hands such a block to the next request of that size; so does malloc on CPU as a rule.
    """
    like = inputs.result_like
    blocks = [
        like.new_full(shape, float("nan")) for shape in inputs.buffer_shapes for _ in range(POISON_BLOCKS)
    ]
    del blocks
