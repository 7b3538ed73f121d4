"""Attention as transformers' models call it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flashmoe_science.huggingface.masks import window_of
from flashmoe_science.takeover.attention import as_autocast, attempt, attempt_with_options
from flashmoe_science.takeover.counts import Entry, count

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

_WITH_OPTIONS = {"softcap": "scores with a soft cap", "s_aux": "attention sinks"}
"""Arguments that the library's SDPA has not, and what they are."""
_NEVER = {"position_bias": "a bias of positions", "cache": "a paged cache"}


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
    special = [name for name in _WITH_OPTIONS if kwargs.get(name) is not None]
    window = None
    whole = query.shape[2], key.shape[2]
    if attention_mask is not None and not is_dynamo_compiling() and attention_mask.shape[-2:] == whole:
        window = window_of(attention_mask)
    if special or window is not None:
        attended = _with_options(
            module, query, key, value, attention_mask, window, dropout, scaling, is_causal, kwargs
        )
        if not isinstance(attended, str):
            count(Entry.HUGGING_FACE_ATTENTION, None)
            return attended.transpose(1, 2).contiguous(), None
        if special:
            count(Entry.HUGGING_FACE_ATTENTION, f"{_WITH_OPTIONS[special[0]]}: {attended}")
            return _eager(module, query, key, value, attention_mask, dropout, scaling, is_causal, kwargs)
    result: torch.Tensor | str
    refusals = [what for name, what in _NEVER.items() if kwargs.get(name) is not None]
    if refusals:
        result = refusals[0]
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


def _with_options(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    window: int | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> torch.Tensor | str:
    """With a window, a soft cap or sinks: (batch, heads, seqlen_q, head_dim), or why the kernels do not take it.

    Args:
        window: what the mask says, see `masks.window_of`; None where there is no mask, or it does not say.
    """
    if mask is not None and window is None:
        return "a mask"
    for name, what in _NEVER.items():
        if kwargs.get(name) is not None:
            return what
    if kwargs.get("softcap") == 0:
        return "a soft cap of zero"
    query, key, value = as_autocast(query, key, value)
    causal = mask is not None or (query.shape[2] > 1 and _is_causal(module, is_causal))
    if mask is None and causal and query.shape[2] < key.shape[2]:
        # Without a mask the library's calls are aligned top-left: no row sees the keys behind the last query.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    return attempt_with_options(
        query,
        key,
        value,
        causal=causal,
        window=-1 if window is None else window,
        softcap=kwargs.get("softcap") or 0.0,
        sinks=kwargs.get("s_aux"),
        dropout_p=dropout,
        scale=scaling,
    )


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
