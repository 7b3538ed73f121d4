"""Bits that do not depend on the batch: ``num_splits`` as FlashAttention and PyTorch mean it, and bounds for vLLM."""

from __future__ import annotations

_KEYS = 512
"""Of a part, where the caller wants bits that do not depend on the batch: least for all batches (docs/varlen.md)."""

_ONE_KERNEL_FROM = 16
"""Tokens of the longest sequence from which on CUDA's kernel with `split_keys` does not depend on them."""


def invariant_split(num_splits: object) -> int | None:
    """``split_keys`` of `attention_varlen`: 1 asks for bits that do not depend on the batch, others for nothing."""
    return _KEYS if isinstance(num_splits, int) and num_splits == 1 else None


def invariant_bound(max_seqlen_q: int) -> int:
    """``max_seqlen_q`` with which all sequences of several tokens have one kernel, whatever the longest one is."""
    return max_seqlen_q if max_seqlen_q <= 1 else max(max_seqlen_q, _ONE_KERNEL_FROM)
