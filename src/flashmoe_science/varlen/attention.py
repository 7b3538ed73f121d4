"""Attention for serving, on whichever device the tensors are."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from flashmoe_science.direct import all_direct, has_own_layout
from flashmoe_science.operators.varlen import VARLEN
from flashmoe_science.torch_private import forward_levels
from flashmoe_science.varlen import launch as launching
from flashmoe_science.varlen.arguments import Inputs, Options, check, check_out
from flashmoe_science.varlen.launch import launch, reject_gradients, repeated


def attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    cu_seqlens_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    split_keys: int | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    chunk: int = 0,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences of any lengths in one call: prompts, chunks of prompts and decode steps, as they come.

    Query rows of all sequences lie one after another. Keys lie likewise, or in the pages of a cache. Lengths are int32
    tensors on the device; the host never reads them, so nothing is synchronised, and a CUDA graph can be replayed
    after they changed in place. Autograd does not record it.

    Let n and m be the numbers of queries and keys of a sequence. Query i stands at position p = i + m - n: masks align
    bottom-right. Its score with key j is s_j = softmax_scale * query_i @ key_j, then softcap * tanh(s_j / softcap) if
    there is a cap, then s_j - slope * abs(p - j) with ALiBi. Row i of the result is
    sum_j exp(s_j) value_j / (sum_j exp(s_j) + exp(sink)), over the keys that it sees: those with j < m; j <= p if
    causal; p - left <= j <= p + right in a window; j // chunk == p // chunk with chunks.

    Args:
        query: (tokens, heads, head_dim); float32 (on CPU only), bfloat16 or float16; any strides whose last is 1.
        key, value: packed (keys, kv_heads, head_dim), or in pages (pages, page_size, kv_heads, head_dim), of the same
            dtype and device, or of FP8 (see key_scale); value may have another last dimension, value_dim. Any page
            size, any strides whose last is 1. Query head h uses key/value head h // (heads // kv_heads). head_dim and
            value_dim are multiples of 8.
        cu_seqlens_q: (batch + 1,) int32, begins with 0: query rows of sequence b are cu_seqlens_q[b] to
            cu_seqlens_q[b + 1]. A sequence may have none.
        max_seqlen_q, max_seqlen_k: no sequence has more queries, or keys. Bounds, not lengths: for a CUDA graph, the
            largest that will be replayed.
        cu_seqlens_k: (batch + 1,) int32: the same of packed keys.
        block_table: (batch, pages) int32: which page holds keys [i * page_size, (i + 1) * page_size) of a sequence.
            Sequences may share pages. Entries behind a sequence's length are never read as pages.
        seqused_k: (batch,) int32: how many keys each sequence has, up to what its row of the table, or its part of
            packed keys, can hold. Needed with block_table; without it, all packed keys are used.
        causal: a query sees no key behind its own position.
        window: (left, right), how many keys a query sees before and after its position beside that one; -1: all.
            Where causal is true, right is 0.
        softcap: 0 for none.
        sinks: (heads,) float32: for each head, a logit that takes part in the sum and has no value; minus infinity for
            none.
        alibi_slopes: (heads,) or (batch, heads) float32.
        softmax_scale: positive; 1 / sqrt(head_dim) if None.
        out: (tokens, heads, value_dim) of query's dtype, any strides whose last is 1: the result goes there, and is
            returned. It may not overlap the other tensors.
        return_lse: also return the log-sum-exp of the scores. The sink is not in it, so that results for parts of the
            keys can be merged, and the sink added once.
        split_keys: a multiple of 128. Sums over a sequence's keys are cut at each multiple of it and added in that
            order. The bits of a sequence's rows then depend on its own queries and keys alone, not on what else is in
            the batch, nor on where its pages lie; on CUDA those of several tokens among calls whose max_seqlen_q is
            the same, or 16 and more, as that decides the kernel. None: cuts depend on the batch; equal calls still
            give equal bits.
        key_scale, value_scale: float32, of a cache of torch.float8_e4m3fn, with queries of 16 bits: () for all keys,
            (kv_heads,), or for each key and head: the shape of key without its last dimension. An element times its
            scale is the key. None: 1. CUDA's decode kernel widens FP8 in registers, exactly, and may read its code for
            NaN as 480; it multiplies in float16, where 65,504 is the largest. Prompts,
            and the CPU, go by way of a wider copy of the keys that the batch has.
        chunk: keys of a chunk, up to 2**30: a query sees those of its own chunk alone, as in the local layers of
            Llama 4. Other chunks' keys are not read. 0: no chunks.
        tree_mask: (tokens,) int64, for trees of draft tokens: of the keys of its sequence's own query tokens, the last
            n of the m, a row sees the j-th only if bit j of its word is set, in addition to what causal and the right
            side of a window say. Keys before them are seen as without. Words of sequences with more than 64 queries
            are not looked at. Not with chunk, alibi_slopes or the left side of a window, which go by position.

    Returns:
        The output, (tokens, heads, value_dim); with `return_lse` also the natural log-sum-exp, float32,
        (tokens, heads). A row that sees no key gives zeros and minus infinity, whatever the sink. So do rows of query
        that belong to no sequence, from cu_seqlens_q[batch] on. What no row sees (the rest of a page, pages that are
        not named, hidden keys) has no effect, NaN and infinity included. A row that sees a NaN is NaN.

    Raises:
        InputError: arguments that do not fit together, have no memory, or require a gradient. On the CPU also lengths
            and pages that lie outside their tensors; on CUDA these are the caller's to keep.
        DeviceError: no kernel for this call on this device, or nothing on the machine to compile one with.
        BuildError: the kernel did not compile.

    Reference: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention (2023),
    arXiv:2309.06180; Dao et al., FlashAttention (2022), arXiv:2205.14135; Xiao et al., Efficient Streaming Language
    Models with Attention Sinks (2023), arXiv:2309.17453; Press et al., Train Short, Test Long (2021), arXiv:2108.12409.
    """
    attempt = None if is_dynamo_compiling() else launching.of_thread.steady.attempt
    if attempt is not None and forward_levels._current_level < 0:
        results = attempt(
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            block_table,
            seqused_k,
            sinks,
            alibi_slopes,
            out,
            key_scale,
            value_scale,
            tree_mask,
            causal,
            window,
            softcap,
            softmax_scale,
            split_keys,
            return_lse,
            chunk,
            max_seqlen_q,
            max_seqlen_k,
        )
        if results is not None:
            return results  # type: ignore[no-any-return]
    given = (
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        block_table,
        seqused_k,
        sinks,
        alibi_slopes,
        out,
        key_scale,
        value_scale,
        tree_mask,
    )
    chosen = causal, window, softcap, softmax_scale, split_keys, return_lse, chunk
    if not is_dynamo_compiling():
        results = repeated(given, chosen, max_seqlen_q, max_seqlen_k)
        if results is not None:
            return results
    inputs, options = Inputs(*given), Options(*chosen)
    if is_dynamo_compiling() or not all_direct(
        query, key, value, sinks, alibi_slopes, out, key_scale, value_scale, tree_mask
    ):
        result, lse = _dispatched(inputs, options, max_seqlen_q, max_seqlen_k)
        return (result, lse) if return_lse else result
    result, own_lse = launch(inputs, options, max_seqlen_q, max_seqlen_k)
    return result if own_lse is None else (result, own_lse)


def _dispatched(
    inputs: Inputs, options: Options, max_seqlen_q: int, max_seqlen_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """By way of the dispatcher. torch.compile traces this, so what is checked is checked by the operator."""
    if not is_dynamo_compiling() and has_own_layout():
        check(inputs, options)
    causal, (left, right), softcap, softmax_scale, split_keys, _, chunk = options
    out = inputs.out
    if out is not None:
        reject_gradients(out)
        check_out(out, inputs.query, inputs.value)
    result, lse = VARLEN(
        *inputs[:9],
        max_seqlen_q,
        max_seqlen_k,
        causal,
        left,
        right,
        softcap,
        softmax_scale,
        split_keys,
        inputs.key_scale,
        inputs.value_scale,
        chunk,
        inputs.tree_mask,
    )
    return result if out is None else out.copy_(result), lse
