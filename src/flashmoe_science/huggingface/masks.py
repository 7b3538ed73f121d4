"""Masks as transformers' models ask for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from flashmoe_science.torch_private import is_recorded_by_jit, transform


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
    strides. A causal mask without padding carries its window, see `window_of`. Under torch.compile a token alone has
    none: all of the library's own functions show it to itself. The others are the library's: None where attention is
    full or plainly causal.

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
    if mask is not None and _may_be_looked_at(mask, attention_mask):
        window = _window(options.get("mask_function"))
        at_the_end = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
        if window is not None and at_the_end and not options.get("use_vmap"):
            keys = slice(kv_offset, kv_offset + kv_length)
            all_seen = attention_mask is None or (
                attention_mask.shape[1] >= keys.stop and bool(attention_mask[:, keys].all())
            )
            if all_seen:
                setattr(mask, _SEEN, _Seen(window, mask._version))
    return mask


def _may_be_looked_at(*tensors: torch.Tensor | None) -> bool:
    """Whether their values are there to be read, and what is written to them is counted."""
    if torch.compiler.is_compiling() or is_recorded_by_jit() or transform() is not None:
        return False
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) is not torch.Tensor
            or tensor.is_meta
            or tensor.is_inference()
            or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            return False
    return True


class _Seen(NamedTuple):
    """What a mask showed when it was made."""

    window: int
    version: int


_SEEN = "_flashmoe_science_seen"
"""A mask's attribute. Whatever is computed from the mask is another tensor, which has none."""
_EVERYTHING = -1


def window_of(mask: torch.Tensor) -> int | None:
    """How many keys before its own each query sees, -1 for all, if a mask is causal, aligned bottom-right, and hides
    nothing else; None if that is not known.

    Only a mask that `attention_mask` made, and that nobody has written to since in a way that PyTorch counts, says so.
    """
    seen: _Seen | None = getattr(mask, _SEEN, None)
    return seen.window if seen is not None and seen.version == mask._version else None


def _window(mask_function: Any) -> int | None:
    """Of a function of the library's, by what it is made of; None for all but plain and sliding causal masks."""
    if mask_function is causal_mask_function:
        return _EVERYTHING
    match _closed_over(mask_function, "and_masks.<locals>.and_mask", "mask_functions"):
        case (overlay, causal) if causal is causal_mask_function:
            width = _closed_over(overlay, "sliding_window_overlay.<locals>.inner_mask", "sliding_window")
            return width - 1 if isinstance(width, int) and width > 0 else None
    return None


def _closed_over(function: Any, qualified_name: str, variable: str) -> Any:
    """A variable of the function that made this one; None if it is another function."""
    if (
        getattr(function, "__qualname__", None) != qualified_name
        or function.__module__ != sdpa_mask.__module__
    ):
        return None
    names = function.__code__.co_freevars
    return function.__closure__[names.index(variable)].cell_contents if variable in names else None
