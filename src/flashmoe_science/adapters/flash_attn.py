"""FlashAttention's functions, by these kernels: FlashAttention-3's names, layouts and semantics.

``import flashmoe_science.adapters.flash_attn as flash_attn_interface`` is the whole change of a program. What only
tells FlashAttention how to run (pack_gqa, deterministic, sm_margin, scheduler_metadata) is taken and changes nothing:
equal calls always give equal bits. ``num_splits=1`` asks for bits that do not depend on the batch, without gradients,
and other numbers for nothing. What these kernels do not compute is refused in one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashmoe_science.adapters.splits import invariant_split
from flashmoe_science.arguments import check_dense, check_flag, shown
from flashmoe_science.attention import flash_attention
from flashmoe_science.errors import InputError
from flashmoe_science.varlen.append import paged_append, slots_of
from flashmoe_science.varlen.attention import attention_varlen
from flashmoe_science.varlen.transform import Rotary, transformed

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_HINTS = frozenset(
    ("num_splits", "pack_gqa", "deterministic", "sm_margin", "scheduler_metadata", "fa_version", "q_descale")
)
"""They do not change what is computed; queries are never of FP8."""
_NEUTRAL = {"dropout_p": 0.0, "cp_world_size": 1, "cp_rank": 0}
"""Arguments of things that are not computed here, as they are where nobody asks for those; None for all others."""
_NEEDED = ("q", "k", "v", "k_cache", "v_cache")
_FP8 = torch.float8_e4m3fn


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    window_size: Sequence[int] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_attn_probs: bool = False,
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of dense batches; differentiable but for chunks, values of another head_dim, and ``num_splits=1``.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k, v: (batch, seqlen_k, kv_heads, head_dim); v may have another last dimension.
        attention_chunk: a query sees keys of its own chunk of so many alone; 0: no chunks.
        window_size, softcap, sinks: as `flashmoe_science.flash_attention` takes them.
        return_attn_probs: also return the log-sum-exp, (batch, heads, seqlen_q) float32.

    Raises:
        InputError: see `flash_attention`; also an argument for something that is not computed here.
    """
    _refuse_others("flash_attn_func", others)
    _check_tensors({"q": (q, 4), "k": (k, 4), "v": (v, 4), "sinks": (sinks, 1)})
    wanted = check_flag("return_attn_probs", return_attn_probs)
    other_dimension = v.shape[-1] != q.shape[-1]
    # `flash_attention` shares the work of a batch by its size, so its bits depend on the batch.
    if type(attention_chunk) is not int or attention_chunk or other_dimension or _split(others) is not None:
        return flash_attn_with_kvcache(
            q,
            k,
            v,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            attention_chunk=attention_chunk,
            softcap=softcap,
            sinks=sinks,
            return_softmax_lse=wanted,
            **others,
        )
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
    return (output, result[1]) if wanted else output


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    return_attn_probs: bool = False,
    return_softmax_lse: bool = False,
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences of any lengths: see `flashmoe_science.attention_varlen`. No gradients.

    Args:
        q: (tokens, heads, head_dim).
        k, v: (keys, kv_heads, head_dim), or with block_table (pages, page_size, kv_heads, head_dim).
        cu_seqlens_k: left out with block_table, as vLLM does, or not looked at there. The two bounds are always needed.
        block_table, seqused_k, s_aux, out, return_softmax_lse: vLLM's additions; s_aux are sinks.
        k_descale, v_descale: of keys and values in FP8, (batch, kv_heads), the same for every sequence, with queries of
            16 bits. Not looked at for others.

    Returns:
        The output; with return_attn_probs or return_softmax_lse also the log-sum-exp, (heads, tokens) float32.
    """
    _refuse_others("flash_attn_varlen_func", others)
    _check_tensors({"q": (q, 3), "k": (k, 0), "v": (v, 0)})
    _check_tensors({"s_aux": (s_aux, 1), "k_descale": (k_descale, 0), "v_descale": (v_descale, 0)})
    if max_seqlen_q is None or max_seqlen_k is None:
        missing = "max_seqlen_q" if max_seqlen_q is None else "max_seqlen_k"
        raise InputError(f"{missing} is missing; expected the most that one sequence has")
    wanted = check_flag("return_attn_probs", return_attn_probs) or check_flag(
        "return_softmax_lse", return_softmax_lse
    )
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
        split_keys=_split(others),
        key_scale=_scale("k_descale", k, k_descale),
        value_scale=_scale("v_descale", v, v_descale),
    )
    return (result[0], result[1].T) if wanted else result[0]


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
    window_size: Sequence[int] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
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
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): q and k are turned by them first. New keys stand behind
            those that were there, or from rotary_seqlens on, (batch,). So do queries of a causal or local call; else
            all of a sequence stand at the first of these positions.
        rotary_interleaved: pairs are elements 2i and 2i + 1; else i and i + rotary_dim / 2.
        k_descale, v_descale: see `flash_attn_varlen_func`; new keys and values are divided by them.

    Returns:
        The output, like q; with return_softmax_lse also the log-sum-exp, (batch, heads, seqlen_q), or (heads, tokens).
    """
    _refuse_others("flash_attn_with_kvcache", others)
    table = page_table if page_table is not None else block_table
    packed_rows = 3 if cu_seqlens_k_new is not None else 4
    _check_tensors(
        {
            "q": (q, 4 if cu_seqlens_q is None else 3),
            "k_cache": (k_cache, 4),
            "v_cache": (v_cache, 4),
            "k": (k, packed_rows),
            "v": (v, packed_rows),
            "page_table": (table, 2),
            "cache_batch_idx": (cache_batch_idx, 1),
            "cu_seqlens_q": (cu_seqlens_q, 1),
            "cu_seqlens_k_new": (cu_seqlens_k_new, 1),
            "sinks": (sinks, 1),
            "s_aux": (s_aux, 1),
            "cache_seqlens": (cache_seqlens if isinstance(cache_seqlens, torch.Tensor) else None, 1),
            "rotary_cos": (rotary_cos, 0),
            "rotary_sin": (rotary_sin, 0),
            "rotary_seqlens": (rotary_seqlens, 1),
            "k_descale": (k_descale, 0),
            "v_descale": (v_descale, 0),
        },
        optional=("k", "v"),
    )
    for name, flag in (("causal", causal), ("return_softmax_lse", return_softmax_lse)):
        check_flag(name, flag)
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
    for name, numbers, entries in (
        ("page_table", table, batch),
        ("cache_seqlens", cache_seqlens, batch),
        ("rotary_seqlens", rotary_seqlens, batch),
        ("cu_seqlens_k_new", cu_seqlens_k_new, batch + 1),
        ("k", k if cu_seqlens_k_new is None else None, batch),
    ):
        if isinstance(numbers, torch.Tensor) and (not numbers.dim() or numbers.shape[0] != entries):
            raise InputError(
                f"{name} has shape {tuple(numbers.shape)}, but q has {batch} sequences; expected {entries} entries"
            )
    slots = table.shape[1] * k_cache.shape[1]
    used = _lengths(cache_seqlens, batch, slots, q.device)
    key_scale, value_scale = _scale("k_descale", k_cache, k_descale), _scale("v_descale", v_cache, v_descale)
    turns = _turns(rotary_cos, rotary_sin)
    if turns is not None and k is None:
        raise InputError(
            "rotary_cos is given without k and v; expected new keys, which it turns with the queries"
        )
    began = used if rotary_seqlens is None else rotary_seqlens
    if k is not None and v is not None:
        caches = k_cache, v_cache, key_scale, value_scale
        used = _append(k, v, caches, table, used, cu_seqlens_k_new, turns, began, rotary_interleaved)
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
    if turns is not None:
        sequence, row, _ = _rows(starts, packed.shape[0])
        moving = causal or _sides(window_size) != (-1, -1) or attention_chunk != 0
        position = began.long()[sequence] + (row if moving else 0)
        turned = transformed("q", packed, None, Rotary(turns, position, rotary_interleaved), 0.0)
        packed = turned.to(q.dtype)
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
        split_keys=_split(others),
        key_scale=key_scale,
        value_scale=value_scale,
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
    caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    table: torch.Tensor,
    used: torch.Tensor,
    cu_seqlens_k_new: torch.Tensor | None,
    turns: torch.Tensor | None,
    began: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """Write new keys, turned, behind those that are used; how many are used then."""
    k_cache, v_cache, key_scale, value_scale = caches
    starts = cu_seqlens_k_new
    if starts is None:
        starts = torch.arange(table.shape[0] + 1, dtype=torch.int32, device=k.device) * k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    sequence, row, owned = _rows(starts, k.shape[0])
    # Rows behind the last sequence's are padding: they go nowhere, and a position of 0 is always there.
    position = torch.where(owned, used.long()[sequence] + row, 0)
    slots = slots_of(table, k_cache.shape[1], sequence, position)
    rotary = None
    if turns is not None:
        rotary = Rotary(turns, torch.where(owned, began.long()[sequence] + row, 0), interleaved)
    paged_append(
        k,
        v,
        k_cache,
        v_cache,
        torch.where(owned, slots, -1),
        key_scale=key_scale,
        value_scale=value_scale,
        rotary=rotary,
    )
    return used + starts.diff()


def _rows(starts: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of packed rows: which sequence's each is, its number there, and whether it is any's. Those behind the last
    sequence's count as its first.
    """
    token = torch.arange(rows, dtype=torch.int64, device=starts.device)
    starts = starts.long()
    owned = token < starts[-1]
    sequence = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp_(max=starts.shape[0] - 2)
    return sequence, torch.where(owned, token - starts[sequence], 0), owned


def _turns(cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor | None:
    """As `Rotary` has them."""
    if cos is None and sin is None:
        return None
    if cos is None or sin is None or cos.shape != sin.shape or cos.dim() != 2 or cos.dtype != sin.dtype:
        shapes = [None if each is None else tuple(each.shape) for each in (cos, sin)]
        raise InputError(
            f"rotary_cos and rotary_sin have shapes {shapes[0]} and {shapes[1]}; expected both, of one dtype, each "
            "(positions, rotary_dim / 2)"
        )
    return torch.cat([cos, sin], -1)


def _scale(name: str, cache: torch.Tensor, descale: torch.Tensor | None) -> torch.Tensor | None:
    """As `attention_varlen` takes it. FlashAttention does not look at one of keys that are not of FP8."""
    if cache.dtype is not _FP8:
        return None
    if descale is None or descale.dim() < 2 or not descale.shape[0]:
        return descale
    if descale.stride(0) and descale.shape[0] > 1:
        raise InputError(
            f"{name} has a row for each sequence; expected one for all, expanded to (batch, kv_heads), or (kv_heads,)"
        )
    return descale[0]


def _split(others: dict[str, Any]) -> int | None:
    return invariant_split(others.get("num_splits"))


def _lengths(
    cache_seqlens: int | torch.Tensor | None, batch: int, slots: int, device: torch.device
) -> torch.Tensor:
    if isinstance(cache_seqlens, torch.Tensor):
        if cache_seqlens.dtype not in (torch.int32, torch.int64):
            raise InputError(f"cache_seqlens has dtype {cache_seqlens.dtype}; expected int32")
        return cache_seqlens.to(torch.int32)
    if cache_seqlens is not None and (
        not isinstance(cache_seqlens, int) or not -(2**31) <= cache_seqlens < 2**31
    ):
        raise InputError(f"cache_seqlens is {shown(cache_seqlens)}; expected an int, or (batch,) int32")
    length = slots if cache_seqlens is None else cache_seqlens
    return torch.full((batch,), length, dtype=torch.int32, device=device)


def _sides(window_size: Sequence[int] | None) -> tuple[int, int]:
    """vLLM says None where there is no window."""
    if window_size is None:
        return -1, -1
    if not isinstance(window_size, Sequence) or len(window_size) != 2:
        raise InputError(f"window_size is {shown(window_size)}; expected (left, right)")
    return window_size[0], window_size[1]


def _as_float32(sinks: torch.Tensor | None) -> torch.Tensor | None:
    return None if sinks is None else sinks.float()


def _check_tensors(named: dict[str, tuple[torch.Tensor | None, int]], optional: Sequence[str] = ()) -> None:
    """InputError unless these are dense tensors of one device, of as many dimensions, 0 for any. None is for what this
    module's functions have a default for, and for what is optional.
    """
    given = {
        name: tensor
        for name, (tensor, _) in named.items()
        if tensor is not None or (name in _NEEDED and name not in optional)
    }
    check_dense(**given)
    for name, (tensor, dimensions) in named.items():
        if tensor is not None and dimensions and tensor.dim() != dimensions:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}; expected {dimensions} dimensions")


def _refuse_others(function: str, others: dict[str, Any]) -> None:
    """Raise InputError for an argument that would change the result, and that these kernels do not know."""
    for name, argument in others.items():
        neutral = argument is None or (isinstance(argument, (int, float)) and argument == _NEUTRAL.get(name))
        if name not in _HINTS and not neutral:
            raise InputError(
                f"{function} here does not compute {name}; check its spelling, leave it out, or call "
                "FlashAttention's own"
            )
