"""Attention as transformers' models call it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flashmoe_science.takeover.attention import as_autocast, attempt
from flashmoe_science.takeover.counts import Entry, count

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

_ONLY_EAGER = {"softcap": "scores with a soft cap", "s_aux": "attention sinks"}
"""Arguments that the library's SDPA has not, and what they are."""


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The contract of ``transformers.AttentionInterface``.

    Args:
        module: a layer of the model; its ``is_causal`` counts where the argument is None.
        query: (batch, heads, seqlen_q, head_dim).
        key, value: (batch, kv_heads, seqlen_k, head_dim), kv_heads not repeated.
        attention_mask: what the library's ``sdpa_mask`` made: None, or booleans.

    Returns:
        (batch, seqlen_q, heads, head_dim), contiguous; and None, or weights from a model's own eager attention.
    """
    if "softcap" in kwargs or "s_aux" in kwargs:
        for name, what in _ONLY_EAGER.items():
            if kwargs.get(name) is not None:
                count(Entry.HUGGING_FACE_ATTENTION, what)
                return _eager(module, query, key, value, attention_mask, dropout, scaling, is_causal, kwargs)
    result: torch.Tensor | str
    if kwargs.get("position_bias") is not None:
        result = "a bias of positions"
    elif kwargs.get("cache") is not None:
        result = "a paged cache"
    else:
        result = attempt(
            # Of float32 weights autocast leaves rotated queries and keys in float32, and values in 16 bits.
            *as_autocast(query, key, value),
            attn_mask=attention_mask,
            dropout_p=dropout,
            # One query sees all keys there are: those of a decode step.
            is_causal=attention_mask is None and query.shape[2] > 1 and _is_causal(module, is_causal),
            scale=scaling,
            grouped=True,
        )
    if isinstance(result, str):
        count(Entry.HUGGING_FACE_ATTENTION, result)
        declined: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
        return declined
    count(Entry.HUGGING_FACE_ATTENTION, None)
    return result.transpose(1, 2).contiguous(), None


def _eager(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The eager attention of the model's own file, whose mask is one that is added."""
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    if mask is None and seqlen_q > 1 and _is_causal(module, is_causal):
        rows = torch.arange(seqlen_q, dtype=torch.int64, device=query.device)[:, None]
        mask = rows >= torch.arange(seqlen_k, dtype=torch.int64, device=query.device)
        mask = mask[None, None]
    if mask is not None and mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, torch.finfo(query.dtype).min)
    return eager_forward(type(module))(
        module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs
    )


def _is_causal(module: torch.nn.Module, argument: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if argument is None else argument)


def eager_forward(layer: type[torch.nn.Module]) -> Forward:
    """``eager_attention_forward`` of the file that a layer's class, or one that it inherits from, is in."""
    for each in layer.__mro__:
        forward: Forward | None = getattr(sys.modules[each.__module__], "eager_attention_forward", None)
        if forward is not None:
            return forward
    raise NotImplementedError(
        f"{layer.__name__} has no eager attention to go to; use another attn_implementation"
    )
