"""PyTorch's `torch.nn.attention.varlen` by these kernels: names, layouts and semantics as PyTorch 2.13 documents them.

``from flashmoe_science.adapters.torch_varlen import varlen_attn`` is the whole change of a program that does not train
with it: there are no gradients. It also runs on the CPU, and in float32 there.
"""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.adapters.splits import invariant_split
from flashmoe_science.arguments import check_dense, check_flag, shown
from flashmoe_science.errors import InputError
from flashmoe_science.varlen.attention import attention_varlen

__all__ = ["varlen_attn", "varlen_attn_out"]


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences of any lengths: see `flashmoe_science.attention_varlen`. No gradients.

    Args:
        query: (tokens, heads, head_dim).
        key, value: (keys, kv_heads, head_dim), or with block_table (pages, page_size, kv_heads, head_dim).
        cu_seq_q, cu_seq_k: (batch + 1,) int32; the second is not looked at with block_table.
        return_aux: PyTorch's ``AuxRequest``, or what else has ``lse``: whether to return the log-sum-exp too.
        window_size: (left, right) beside a query's own position, aligned bottom-right; (-1, 0) is causal.
        enable_gqa: whether key and value may have fewer heads than query.
        num_splits: 1: the bits of a sequence do not depend on what else is in the batch. Other numbers change nothing.

    Returns:
        The output; with ``return_aux.lse`` also the natural log-sum-exp, float32, (tokens, heads), which is the shape
        that PyTorch documents.

    Raises:
        InputError: see `attention_varlen`; also heads that differ without enable_gqa.
    """
    return varlen_attn_out(
        None,
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        return_aux=return_aux,
        scale=scale,
        window_size=window_size,
        enable_gqa=enable_gqa,
        seqused_k=seqused_k,
        block_table=block_table,
        num_splits=num_splits,
    )


def varlen_attn_out(
    out: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`varlen_attn` into a tensor of the caller's, (tokens, heads, value_dim), which is returned; into one of its own
    for None.
    """
    check_dense(query=query, key=key, value=value)
    if (
        not check_flag("enable_gqa", enable_gqa)
        and query.dim() == 3
        and key.dim() >= 2
        and query.shape[1] != key.shape[-2]
    ):
        raise InputError(
            f"query has {query.shape[1]} heads and key {key.shape[-2]}; expected as many, or enable_gqa=True"
        )
    if not isinstance(window_size, (list, tuple)):
        raise InputError(f"window_size is {shown(window_size)}; expected (left, right)")
    return attention_varlen(
        query,
        key,
        value,
        cu_seqlens_q=cu_seq_q,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        cu_seqlens_k=None if block_table is not None else cu_seq_k,
        block_table=block_table,
        seqused_k=seqused_k,
        causal=False,
        window=tuple(window_size),  # type: ignore[arg-type]  # a list of two is one there, too
        softmax_scale=scale,
        out=out,
        return_lse=return_aux is not None and bool(return_aux.lse),
        split_keys=invariant_split(num_splits),
    )
