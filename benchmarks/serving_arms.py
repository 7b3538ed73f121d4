"""Who computes the batches of `serving.py`: each function makes a call that takes nothing and returns the output."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from serving_batches import Batch
from torch import Tensor

from flashmoe_science import attention_varlen, flash_attention

Call = Callable[[], Tensor]
_WORKSPACE_BYTES = 256 << 20


def ours(batch: Batch, page: int, **options: Any) -> Call:
    """`attention_varlen` over pages of this size; 0: over packed keys."""
    key, value = batch.pages(page) if page else (batch.key, batch.value)
    lengths: dict[str, Any] = {"cu_seqlens_k": batch.starts_k}
    if page:
        lengths = {"block_table": batch.tables[page], "seqused_k": batch.lengths}
    if batch.scale is not None:
        options |= {"key_scale": batch.scale, "value_scale": batch.scale}
    return partial(
        attention_varlen,
        *(batch.query, key, value),
        cu_seqlens_q=batch.starts_q,
        max_seqlen_q=max(batch.queries),
        max_seqlen_k=max(batch.keys),
        **lengths,
        **options,
    )


def dense(batch: Batch, *, causal: bool = True, heads_first: bool = True) -> Call:
    """`flash_attention` over as many keys in dense tensors; (batch, heads, seqlen, dim)."""
    return partial(flash_attention, *batch.dense(heads_first=heads_first), causal=causal)


def tokens_of_dense(output: Tensor) -> Tensor:
    """(batch, heads, seqlen, dim) as (tokens, heads, dim)."""
    return output.transpose(1, 2).flatten(0, 1)


def flash_attn_3(
    batch: Batch,
    page: int,
    *,
    planned: bool = False,
    window: int = -1,
    sinks: Tensor | None = None,
    quantise: bool = False,
) -> Call:
    """FlashAttention-3 over pages, causal, with as many splits as it chooses.

    Args:
        planned: its schedule is made once, ahead; else in every call, by a kernel of its own.
        quantise: a cache in FP8: the call begins with making queries of FP8, which it asks for.
    """
    module = importlib.import_module("flash_attn_interface")
    key, value = batch.pages(page)
    equal = len(set(batch.queries)) == 1
    query = batch.query
    more: dict[str, Any] = {"cu_seqlens_q": batch.starts_q, "max_seqlen_q": max(batch.queries)}
    if equal:  # as it is usually called for decode steps
        query, more = query.view(len(batch.queries), -1, *query.shape[1:]), {}
    sides = (window, 0 if window >= 0 else -1)
    if planned:
        more["scheduler_metadata"] = module.get_scheduler_metadata(
            len(batch.keys),
            max(batch.queries),
            batch.tables[page].shape[1] * page,
            batch.heads,
            batch.kv_heads,
            batch.dim,
            batch.lengths,
            qkv_dtype=key.dtype,
            page_size=page,
            causal=True,
            window_size=sides,
            **({} if equal else {"cu_seqlens_q": batch.starts_q}),
        )
    if batch.scale is not None:
        each = batch.scale.expand(len(batch.keys), -1)
        more |= {"q_descale": torch.ones_like(each), "k_descale": each, "v_descale": each}
    if sinks is not None:
        more["sinks"] = sinks
    call = partial(
        module.flash_attn_with_kvcache,
        k_cache=key,
        v_cache=value,
        cache_seqlens=batch.lengths,
        page_table=batch.tables[page],
        causal=True,
        window_size=sides,
        **more,
    )
    given = query if batch.scale is None or quantise else query.to(key.dtype)

    def run() -> Tensor:
        result = call(given.to(key.dtype) if quantise else given)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    return run


def flash_attn_3_packed(batch: Batch, *, causal: bool) -> Call:
    module = importlib.import_module("flash_attn_interface")
    keys = sum(batch.keys)
    call = partial(
        module.flash_attn_varlen_func,
        *(batch.query, batch.key[:keys], batch.value[:keys]),
        cu_seqlens_q=batch.starts_q,
        cu_seqlens_k=batch.starts_k,
        max_seqlen_q=max(batch.queries),
        max_seqlen_k=max(batch.keys),
        causal=causal,
    )

    def run() -> Tensor:
        result = call()
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    return run


class FlashInfer:
    """Its decode wrapper on tensor cores, planned once, ahead; calls share a workspace, as they follow each other."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._workspace: Tensor | None = None

    def __call__(self, batch: Batch, page: int) -> Call:
        module = importlib.import_module("flashinfer")
        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=True, backend="fa2"
        )
        pages = [-(-length // page) for length in batch.keys]
        table = batch.tables[page]
        numbers = torch.cat([table[row, :count] for row, count in enumerate(pages)])
        wrapper.plan(
            torch.tensor([0, *itertools.accumulate(pages)], dtype=torch.int32),
            numbers,
            torch.tensor([(length - 1) % page + 1 for length in batch.keys], dtype=torch.int32),
            batch.heads,
            batch.kv_heads,
            batch.dim,
            page,
            q_data_type=batch.query.dtype,
            kv_data_type=batch.key.dtype,
            q_len_per_req=batch.queries[0],
        )
        return partial(wrapper.run, batch.query, batch.pages(page))
