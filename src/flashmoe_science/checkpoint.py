"""Selective activation checkpointing: keep what the kernels computed, compute the cheap rest again.

``torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=flashmoe_science.checkpoint.context_fn)``
"""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import create_selective_checkpoint_contexts

from flashmoe_science.operators.registered import operators


def save_list() -> list[Any]:
    """The operators whose results are worth their memory, for a policy of one's own.

    Attention keeps output and log-sum-exp (for each row of query head_dim elements and 4 bytes), an expert layer
    that autograd records a row for each token and the gate and up projections of each of its choices: without these,
    ``fused_moe(..., recompute=True)``.
    """
    return [each.overload for each in operators() if each.kept]


def context_fn() -> tuple[Any, Any]:
    """For `torch.utils.checkpoint.checkpoint`: these operators run once, everything else again in the backward pass."""
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(save_list())  # type: ignore[no-untyped-call]
    return contexts
