"""`torch.nn.functional.scaled_dot_product_attention`, taken over for a while or for good.

What is replaced is the attribute of `torch.nn.functional`, which modules look up when they run and which
torch.compile follows into the graph (and guards, so that code compiled inside a takeover is not used outside of it).
The dispatcher's kernels would also be reached by code that took the function by name earlier. But a compiled graph
would keep, or lack, the takeover of the moment it was compiled in, also from torch's caches on disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.jit._builtins
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from flashmoe_science.takeover.attention import as_autocast, attempt
from flashmoe_science.takeover.counts import Entry, count
from flashmoe_science.torch_private import flash_is_allowed

_NAME = "scaled_dot_product_attention"


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, computed by flashmoe_science where it takes the call, else by
    what was there before.
    """
    previous = _switch.previous
    if not _switch.on:
        return _call(previous, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None and is_causal_bias(attn_mask):
        return _with_causal_bias(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if enable_gqa is not True and enable_gqa is not False:
        count(Entry.SDPA, "enable_gqa is no bool")
        return _call(previous, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not flash_is_allowed():
        count(Entry.SDPA, "torch.nn.attention.sdpa_kernel asks for others")
        return _call(previous, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    result = attempt(
        *as_autocast(query, key, value),
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        grouped=enable_gqa,
    )
    if isinstance(result, str):
        count(Entry.SDPA, result)
        return _call(previous, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    count(Entry.SDPA, None)
    return result


@contextmanager
def sdpa() -> Iterator[None]:
    """Inside ``with sdpa():`` the kernels compute PyTorch's ``scaled_dot_product_attention`` wherever they take a call.

    The others (masks that are more than padding, dropout, nested tensors, head dims, devices) go to what was there
    before, with the same result as without. `report` says how many, and why. The takeover is the whole process's while
    any thread is inside, as that of ``torch.nn.attention.sdpa_kernel`` is: a backward pass that recomputes, in a thread
    of its own, must find what the forward pass found. Contexts nest, and end in any order.

    It reaches calls by ``torch.nn.functional.scaled_dot_product_attention``, those inside torch's own modules among
    them, not a function that was imported from there by name.
    """
    _switch.change(contexts=1)
    try:
        yield
    finally:
        _switch.change(contexts=-1)


def enable_sdpa() -> None:
    """As `sdpa`, for the process, until `disable_sdpa`."""
    _switch.change(enabled=True)


def disable_sdpa() -> None:
    """End what `enable_sdpa` began. Contexts of `sdpa` that are open stay."""
    _switch.change(enabled=False)


class _Switch:
    """Who wants the takeover, and what was there before it."""

    def __init__(self) -> None:
        self.on = False
        self.previous: Callable[..., torch.Tensor] = torch._C._nn.scaled_dot_product_attention
        self._lock = threading.Lock()
        self._enabled = False
        self._contexts = 0

    def change(self, *, enabled: bool | None = None, contexts: int = 0) -> None:
        with self._lock:
            self._enabled = self._enabled if enabled is None else enabled
            self._contexts += contexts
            wanted = self._enabled or self._contexts > 0
            if wanted and not self.on:
                present = getattr(functional, _NAME)
                if present is not scaled_dot_product_attention:
                    self.previous = present
                setattr(functional, _NAME, scaled_dot_product_attention)
            elif self.on and not wanted and getattr(functional, _NAME) is scaled_dot_product_attention:
                # Where somebody replaced it after us, it stays and passes calls on.
                setattr(functional, _NAME, self.previous)
            self.on = wanted


_switch = _Switch()

# torch.jit.script, which compiles what it finds there, is to find the operator.
torch.jit._builtins._register_builtin(scaled_dot_product_attention, f"aten::{_NAME}")


def is_causal_bias(mask: object) -> bool:
    return type(mask).__module__ == "torch.nn.attention.bias" and type(mask).__name__ == "CausalBias"


def _with_causal_bias(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """A mask of ``torch.nn.attention.bias``. Its class knows PyTorch's function by the attribute that is replaced, so
    it is asked directly; for most calls it comes back here without the mask.
    """
    if bias.variant.name == "LOWER_RIGHT" and not is_causal and not is_dynamo_compiling():
        sizes = (query.shape[-2], key.shape[-2]) if query.dim() == 4 == key.dim() else None
        if sizes == (bias.seq_len_q, bias.seq_len_kv) and sizes[0] != sizes[1] and flash_is_allowed():
            result = attempt(
                *as_autocast(query, key, value),
                attn_mask=None,
                dropout_p=dropout_p,
                is_causal=True,
                scale=scale,
                grouped=enable_gqa is True,
                lower_right=True,
            )
            count(Entry.SDPA, result if isinstance(result, str) else None)
            if not isinstance(result, str):
                return result
    output: torch.Tensor = bias._dispatch(query, key, value, bias, dropout_p, is_causal, scale, enable_gqa)
    return output


def _call(
    function: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    return function(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
