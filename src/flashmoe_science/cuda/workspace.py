"""Device memory that the kernels of one call leave each other something in, in parts."""

from __future__ import annotations

from itertools import accumulate

ALIGNMENT = 256
"""Of every part, and of the whole."""


def aligned(size: int) -> int:
    """The bytes that a part of so many takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def place(*sizes: int) -> tuple[int, ...]:
    """Where each part begins, in bytes, and at last where all of them end."""
    return (0, *accumulate(aligned(size) for size in sizes))
