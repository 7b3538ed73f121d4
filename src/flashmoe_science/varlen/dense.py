"""`flash_attention` with a window, a cap or sinks: dense tensors, by the kernels of `attention_varlen`."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from flashmoe_science import autocast
from flashmoe_science.arguments import check_arguments, check_causal, check_flag, reject_without_memory
from flashmoe_science.direct import all_direct, has_own_layout
from flashmoe_science.operators.attention_options import FORWARD
from flashmoe_science.operators.recording import is_recorded
from flashmoe_science.operators.sharding import register_where_used
from flashmoe_science.varlen.dense_forward import check_sinks, forward
from flashmoe_science.varlen.dense_gradients import Options
from flashmoe_science.varlen.options import check_softcap, check_window

EVERYTHING = (-1, -1)
"""The window that hides nothing."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    sinks: torch.Tensor | None,
    softmax_scale: float | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Arguments, results and errors of `flashmoe_science.flash_attention`, which says what they mean.

    Differentiable once. Eager calls on plain tensors go straight to the kernel; all others are the operator
    ``torch.ops.flashmoe_science.flash_attention_with_options``.
    """
    query, key, value = autocast.cast(query, key, value)
    if is_dynamo_compiling():
        left, right = window
        sides = (left, 0 if causal else right)
        return _dispatched(query, key, value, sinks, sides, softcap, softmax_scale, return_lse)
    if not all_direct(query, key, value, sinks):
        if has_own_layout():
            check_arguments(query, key, value, softmax_scale)
            if sinks is not None:
                check_sinks(sinks, query)
        left, right = check_window(window)
        sides = (left, 0 if check_causal(causal) else right)
        register_where_used()
        return _dispatched(query, key, value, sinks, sides, check_softcap(softcap), softmax_scale, return_lse)
    check_arguments(query, key, value, softmax_scale)
    left, right = check_window(window)
    if check_causal(causal):
        right = 0
    softcap, return_lse = check_softcap(softcap), check_flag("return_lse", return_lse)
    if sinks is not None:
        check_sinks(sinks, query)
    reject_without_memory(query=query, key=key, value=value)
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if is_recorded(query, key, value, sinks):
        return _dispatched(query, key, value, sinks, (left, right), softcap, scale, return_lse)
    output, lse = forward(query, key, value, sinks, Options((left, right), softcap, scale), return_lse)
    if not return_lse:
        return output
    assert lse is not None
    return output, lse


def _dispatched(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    sides: tuple[int, int],
    softcap: float,
    softmax_scale: float | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """By way of the dispatcher. torch.compile traces this, so what is checked is checked by the operator."""
    output: torch.Tensor
    lse: torch.Tensor
    output, lse = FORWARD(query, key, value, sinks, sides, softcap, softmax_scale)
    return (output, lse) if return_lse else output
