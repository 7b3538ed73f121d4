"""Continuous batching of transformers by `attention_varlen`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import PagedAttentionCache

from flashmoe_science.errors import InputError
from flashmoe_science.varlen.attention import attention_varlen

PAGED_IMPLEMENTATION = "cudadent42_flash"
"""The library batches continuously with ``sdpa`` and with names that have "flash" in them; only these get no mask. A 2
or 3 behind that word would stand for a version of flash-attention.
"""


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The contract of ``transformers.AttentionInterface`` within continuous batching.

    The library's cache takes new keys and values, and gives those of all sequences, packed. From transformers 5.24 on
    that has happened before the call, which is then without a cache.

    Args:
        query: (1, heads, tokens, head_dim), rows of all sequences; behind the last one's there may be padding.
        key, value: (1, kv_heads, tokens, head_dim), the new ones; those of all sequences where there is no cache.
        sliding_window: how many keys a query sees, its own included.
        cache: the library's ``PagedAttentionCache``.

    Returns:
        (1, tokens, heads, value_dim); and None.

    Raises:
        InputError: a call without a paged cache.
    """
    if cu_seq_lens_q is None or (cache is None and "cu_seq_lens_k" not in kwargs):
        raise InputError(
            f"{PAGED_IMPLEMENTATION} is called without a paged cache; expected generate_batch, or another "
            "attn_implementation: cudadent42"
        )
    if cache is not None:
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs
        )  # which puts the lengths of this layer's kind into kwargs
    output = attention_varlen(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seqlens_q=cu_seq_lens_q,
        max_seqlen_q=max_length_q,
        cu_seqlens_k=kwargs["cu_seq_lens_k"],
        max_seqlen_k=kwargs["max_length_k"],
        window=(-1 if sliding_window is None else sliding_window - 1, -1),
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
        softmax_scale=scaling,
    )
    assert isinstance(output, torch.Tensor)
    return output[None], None


def no_mask(*arguments: Any, **options: Any) -> None:
    """The contract of ``transformers.AttentionMaskInterface``: sequences are told apart by their lengths."""


@contextmanager
def paged_attention(model: Any) -> Iterator[None]:
    """Within it, ``model.generate_batch`` and its like take `attention_varlen`; nothing else of the model's is called.

    The library refuses a name of ours there, and looks for flash-attention where one is set in its own way.

    Args:
        model: a ``transformers.PreTrainedModel``.

    Raises:
        InputError: it is no such model, or does not use the library's attention interface; the library is older than
            5.23, whose cache takes other arguments.
    """
    if "kwargs" not in inspect.signature(PagedAttentionCache.update).parameters:
        raise InputError(
            f"transformers {transformers.__version__} has another paged cache; expected 5.23 or newer"
        )
    if not isinstance(model, PreTrainedModel) or not model._can_set_attn_implementation():
        raise InputError(
            f"model is a {type(model).__name__}; expected one of transformers that uses its attention interface"
        )
    configurations = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    before = [each._attn_implementation_internal for each in configurations]
    try:
        for each in configurations:
            each._attn_implementation_internal = PAGED_IMPLEMENTATION
        yield
    finally:
        for each, implementation in zip(configurations, before, strict=True):
            each._attn_implementation_internal = implementation
