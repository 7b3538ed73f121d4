"""Masks as transformers' models ask for them."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from flashmoe_science.torch_private import is_recorded_by_jit


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    *,
    attention_mask: torch.Tensor | None = None,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> torch.Tensor | None:
    """The contract of ``transformers.AttentionMaskInterface``: what the library's ``sdpa_mask`` gives.

    Masks of padding alone are expanded and not written out, so that `takeover.masks.key_ranges` knows them by their
    strides. Under torch.compile a token alone has none: all of the library's own functions show it to itself. The
    others are the library's: None where attention is full or plainly causal.

    Args:
        attention_mask: (batch, keys), false or 0 for padding.
        options: the rest of the contract, ``mask_function`` among them.

    Returns:
        None, or booleans (batch, 1, q_length, kv_length), True where a key is seen.
    """
    if (
        attention_mask is not None
        and attention_mask.dim() == 2
        and attention_mask.shape[1] >= kv_offset + kv_length
        and options.get("mask_function") is bidirectional_mask_function
        and options.get("local_size") is None
        and not torch.compiler.is_compiling()
        and not is_recorded_by_jit()
    ):
        padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        if allow_is_bidirectional_skip and bool(padding.all()):
            return None
        return padding[:, None, None, :].expand(batch_size, 1, q_length, kv_length)
    if (
        attention_mask is None
        and isinstance(q_length, int)
        and q_length == kv_length == 1
        and not options.get("use_vmap")
        and torch.compiler.is_compiling()
    ):
        return None  # the library makes a mask, as it cannot see there that no texts are packed
    mask: torch.Tensor | None = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        attention_mask=attention_mask,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **options,
    )
    return mask
