"""``num_splits`` as FlashAttention and PyTorch mean it."""

from __future__ import annotations

_KEYS = 512
"""Of a part, where the caller wants bits that do not depend on the batch: least for all batches (docs/varlen.md)."""


def invariant_split(num_splits: object) -> int | None:
    """``split_keys`` of `attention_varlen`: 1 asks for bits that do not depend on the batch, others for nothing."""
    return _KEYS if isinstance(num_splits, int) and num_splits == 1 else None
