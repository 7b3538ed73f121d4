"""FlashAttention's functions, by these kernels: FlashAttention-3's names, layouts and semantics.

``import flashmoe_science.adapters.flash_attn as flash_attn_interface`` is the whole change of a program. What only
tells FlashAttention how to run (num_splits, pack_gqa, deterministic, sm_margin, scheduler_metadata) is taken and
changes nothing: results always have the same bits. What these kernels do not compute is refused in one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashmoe_science.attention import flash_attention
from flashmoe_science.errors import InputError
from flashmoe_science.varlen.append import paged_append, slots_of
from flashmoe_science.varlen.attention import attention_varlen

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_HINTS = frozenset(
    ("num_splits", "pack_gqa", "deterministic", "sm_margin", "scheduler_metadata", "fa_version")
)
"""They do not change what is computed."""
_NEUTRAL = {"dropout_p": 0.0, "attention_chunk": 0, "rotary_interleaved": True}
"""Arguments of things that are not computed here, as they are where nobody asks for those; None for all others."""


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_attn_probs: bool = False,
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of dense batches; differentiable.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k, v: (batch, seqlen_k, kv_heads, head_dim).
        window_size, softcap, sinks: as `flashmoe_science.flash_attention` takes them.
        return_attn_probs: also return the log-sum-exp, (batch, heads, seqlen_q) float32.

    Raises:
        InputError: see `flash_attention`; also an argument for something that is not computed here.
    """
    _refuse_others("flash_attn_func", others)
    result = flash_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        causal=causal,
        softmax_scale=softmax_scale,
        return_lse=True,
        window=_sides(window_size),
        softcap=softcap,
        sinks=_as_float32(sinks),
    )
    output = result[0].transpose(1, 2)
    return (output, result[1]) if return_attn_probs else output


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_attn_probs: bool = False,
    return_softmax_lse: bool = False,
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences of any lengths: see `flashmoe_science.attention_varlen`. No gradients.

    Args:
        q: (tokens, heads, head_dim).
        k, v: (keys, kv_heads, head_dim), or with block_table (pages, page_size, kv_heads, head_dim).
        block_table, seqused_k, s_aux, out, return_softmax_lse: vLLM's additions; s_aux are sinks.

    Returns:
        The output; with return_attn_probs or return_softmax_lse also the log-sum-exp, (heads, tokens) float32.
    """
    _refuse_others("flash_attn_varlen_func", others)
    result = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        cu_seqlens_k=None if block_table is not None else cu_seqlens_k,
        block_table=block_table,
        seqused_k=seqused_k,
        causal=causal,
        window=_sides(window_size),
        softcap=softcap,
        sinks=_as_float32(s_aux),
        alibi_slopes=alibi_slopes,
        softmax_scale=softmax_scale,
        out=out,
        return_lse=True,
        chunk=attention_chunk,
    )
    return (result[0], result[1].T) if return_attn_probs or return_softmax_lse else result[0]


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a cache. New keys are written into it first, behind those that are there, and are attended to.

    Args:
        q: (batch, seqlen_q, heads, head_dim); with cu_seqlens_q (tokens, heads, head_dim).
        k_cache, v_cache: (batch, slots, kv_heads, head_dim); with a table (pages, page_size, kv_heads, head_dim).
        k, v: (batch, new, kv_heads, head_dim); with cu_seqlens_k_new (new of all, kv_heads, head_dim), where rows
            behind the last sequence's are not written.
        cache_seqlens: how many keys there were before; all slots if None.
        cache_batch_idx: (batch,): which row of a dense cache is each sequence's. Not with a table.
        page_table, block_table: (batch, pages) int32: the same, under FlashAttention-3's name and -2's.

    Returns:
        The output, like q; with return_softmax_lse also the log-sum-exp, (batch, heads, seqlen_q), or (heads, tokens).
    """
    _refuse_others("flash_attn_with_kvcache", others)
    table = page_table if page_table is not None else block_table
    if table is not None and cache_batch_idx is not None:
        raise InputError(
            "cache_batch_idx is given with a page table; expected one: the table says where each sequence's keys lie"
        )
    if (k is None) != (v is None):
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise InputError(f"{given} is given without {missing}; expected both, or neither")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if table is None:
        rows = (
            torch.arange(batch, dtype=torch.int64, device=q.device)
            if cache_batch_idx is None
            else cache_batch_idx
        )
        table = rows.to(torch.int32)[:, None]
    slots = table.shape[1] * k_cache.shape[1]
    used = _lengths(cache_seqlens, batch, slots, q.device)
    if k is not None and v is not None:
        used = _append(k, v, k_cache, v_cache, table, used, cu_seqlens_k_new)
    if cu_seqlens_q is None:
        most = q.shape[1]
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * most
        packed = q.reshape(batch * most, *q.shape[2:])
    else:
        if max_seqlen_q is None:
            raise InputError(
                "cu_seqlens_q is given without max_seqlen_q; expected the longest sequence's queries"
            )
        most, starts, packed = max_seqlen_q, cu_seqlens_q, q
    output, lse = attention_varlen(
        packed,
        k_cache,
        v_cache,
        cu_seqlens_q=starts,
        max_seqlen_q=most,
        max_seqlen_k=slots,
        block_table=table,
        seqused_k=used,
        causal=causal,
        window=_sides(window_size),
        softcap=softcap,
        sinks=_as_float32(sinks if sinks is not None else s_aux),
        alibi_slopes=alibi_slopes,
        softmax_scale=softmax_scale,
        return_lse=True,
        chunk=attention_chunk,
    )
    if cu_seqlens_q is None:
        output = output.view(batch, most, *output.shape[1:])
        lse = lse.view(batch, most, lse.shape[1]).transpose(1, 2)
    else:
        lse = lse.T
    return (output, lse) if return_softmax_lse else output


def _append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    used: torch.Tensor,
    cu_seqlens_k_new: torch.Tensor | None,
) -> torch.Tensor:
    """Write new keys behind those that are used; how many are used then."""
    batch = table.shape[0]
    owned = None
    if cu_seqlens_k_new is None:
        new = k.shape[1]
        sequence = torch.arange(batch, dtype=torch.int64, device=k.device).repeat_interleave(new)
        position = used.long()[sequence] + torch.arange(new, dtype=torch.int64, device=k.device).repeat(batch)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        appended = used + new
    else:
        token = torch.arange(k.shape[0], dtype=torch.int64, device=k.device)
        starts = cu_seqlens_k_new.long()
        # Rows behind the last sequence's are padding: they go nowhere, and a position of 0 is always there.
        owned = token < starts[-1]
        sequence = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp_(max=batch - 1)
        position = torch.where(owned, used.long()[sequence] + token - starts[sequence], 0)
        appended = used + cu_seqlens_k_new.diff()
    slots = slots_of(table, k_cache.shape[1], sequence, position)
    paged_append(k, v, k_cache, v_cache, slots if owned is None else torch.where(owned, slots, -1))
    return appended


def _lengths(
    cache_seqlens: int | torch.Tensor | None, batch: int, slots: int, device: torch.device
) -> torch.Tensor:
    if isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens.to(torch.int32)
    length = slots if cache_seqlens is None else cache_seqlens
    return torch.full((batch,), length, dtype=torch.int32, device=device)


def _sides(window_size: Sequence[int]) -> tuple[int, int]:
    left, right = window_size
    return left, right


def _as_float32(sinks: torch.Tensor | None) -> torch.Tensor | None:
    return None if sinks is None else sinks.float()


def _refuse_others(function: str, others: dict[str, Any]) -> None:
    """Raise InputError for an argument that would change the result, and that these kernels do not know."""
    for name, argument in others.items():
        if name not in _HINTS and argument is not None and argument != _NEUTRAL.get(name):
            raise InputError(
                f"{function} here does not compute {name}; leave it out, or call FlashAttention's own"
            )
