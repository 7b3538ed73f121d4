"""Gradients of `flash_attention` with a window, a cap or sinks.

Sinks change only what weights are divided by. So the backward kernels of a call without them compute theirs, from
another log-sum-exp. On CUDA these take windows and caps, too. On the CPU, gradients with one of them are composed of
PyTorch's operations in float32, a block of query rows at a time, over the keys that its rows can see.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch

from flashmoe_science.cpu import attention as cpu
from flashmoe_science.cuda import attention as cuda
from flashmoe_science.errors import KernelDefectError
from flashmoe_science.gradients import Needs
from flashmoe_science.varlen.sink_gradients import with_sinks

_BLOCK_SCORES = 1 << 22
"""Scores of a block, over all heads and sequences: 16 MB in float32."""
_LEAST_ROWS = 16
_FEW_ROWS = 64
"""A block has as many, or as the window has keys: with more, most scores are of hidden keys."""
_CAPS = 1e-2, 1e4
"""Least and most that the kernels take: beyond, few digits of tanh(score / cap) are left in the capped score."""


class Options(NamedTuple):
    """What a call computes, but for its tensors."""

    window: tuple[int, int]
    """(left, right); -1: all. The right one is 0 where the call is causal."""
    softcap: float
    softmax_scale: float
    """Any finite number."""


class Recorded(NamedTuple):
    """What autograd keeps of a call."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor
    sinks: torch.Tensor | None


class Gradients(NamedTuple):
    """None for what is not needed."""

    query: torch.Tensor | None
    key: torch.Tensor | None
    value: torch.Tensor | None
    sinks: torch.Tensor | None


def gradients(
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    call: Recorded,
    options: Options,
    needs: Needs,
    of_sinks: bool,
) -> Gradients:
    """Of what is needed. With sinks the kernels' log-sum-exp is total = log(exp(lse) + exp(sink)): weights are P =
    exp(S - total).
    """
    total, grad_sinks = call.lse, None
    of_rows = any(needs) and call.query.numel() > 0 and call.key.numel() > 0
    if call.sinks is not None and (of_rows or of_sinks):
        grad_output, with_sink, grad_lse, grad_sinks = with_sinks(
            grad_output=grad_output,
            output=call.output,
            lse=call.lse,
            sinks=call.sinks,
            grad_lse=grad_lse,
            total=of_rows,
            of_sinks=of_sinks,
        )
        total = call.lse if with_sink is None else with_sink
    if not of_rows:
        of_query, of_key, of_value = (
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip(call[:3], needs, strict=True)
        )
        return Gradients(of_query, of_key, of_value, grad_sinks)
    window = _effective(options.window, call.query.shape[2], call.key.shape[2])
    kept = (grad_output, *call[:4], total.contiguous(), grad_lse)
    causal = window[1] == 0
    sides = (window[0], -1 if causal else window[1])
    plain = options.softcap == 0 and sides == (-1, -1)
    common: dict[str, Any] = {"causal": causal, "softmax_scale": options.softmax_scale, "needs": needs}
    of_tensors: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] | None = None
    if call.query.is_cuda and (options.softcap == 0 or _CAPS[0] <= options.softcap <= _CAPS[1]):
        try:
            of_tensors = cuda.backward(*kept, **common, window=sides, softcap=options.softcap)
        except KernelDefectError as defect:
            if plain:
                raise
            warnings.warn(
                f"{defect}; composing the gradients of PyTorch's operations", RuntimeWarning, stacklevel=2
            )
    elif plain:
        of_tensors = cpu.backward(*kept, **common)
    if of_tensors is None:
        with torch.autocast(call.query.device.type, enabled=False):
            of_tensors = _composed(grad_output, grad_lse, call, total, options._replace(window=window), needs)
    return Gradients(*of_tensors, grad_sinks)


def _effective(window: tuple[int, int], seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """The window with -1 for a side that hides no key."""
    left, right = window
    return (-1 if left >= seqlen_k - 1 else left), (-1 if right >= seqlen_q - 1 else right)


def _composed(
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    call: Recorded,
    total: torch.Tensor,
    options: Options,
    needs: Needs,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """By the formulas of `flashmoe_science.gradients.Backward`, with the cap's slope 1 - tanh(score / cap)^2."""
    query, key, value = call.query, call.key, call.value
    batch, heads, seqlen_q, head_dim = query.shape
    kv_heads, seqlen_k = key.shape[1:3]
    grouped = batch, kv_heads, heads // max(kv_heads, 1)
    keys, values = key.float(), value.float()
    of_query = torch.zeros_like(query) if needs.query else None
    of_keys = torch.zeros_like(keys) if needs.key else None
    of_values = torch.zeros_like(values) if needs.value else None
    delta = (call.output.float() * grad_output).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    (left, right), softcap, scale = options
    rows = _rows_of_a_block(grad_output, call, options.window)
    first = 0
    while first < seqlen_q:
        end = min(first + rows, seqlen_q)
        offset = seqlen_k - seqlen_q
        low = 0 if left < 0 else max(0, first + offset - left)
        high = seqlen_k if right < 0 else min(seqlen_k, end + offset + right)
        if low < high:
            # Rows of all heads that share a key, side by side.
            block, grads = (
                tensor[:, :, first:end].float().reshape(*grouped[:2], -1, head_dim)
                for tensor in (query, grad_output)
            )
            sums, deltas = (tensor[:, :, first:end].reshape(*grouped[:2], -1, 1) for tensor in (total, delta))
            some_keys, some_values = keys[:, :, low:high], values[:, :, low:high]
            hidden = _hidden(first + offset, end + offset, low, high, options.window, query.device)
            hidden = hidden.repeat(grouped[2], 1)
            scores = block @ some_keys.mT * scale
            slope = None
            if softcap:
                bent = torch.tanh(scores / softcap)
                scores, slope = bent * softcap, 1 - bent * bent
            weights = (scores - sums).exp().masked_fill(hidden, 0)
            of_scores = (weights * (grads @ some_values.mT - deltas)).masked_fill(hidden, 0)
            if slope is not None:
                of_scores = of_scores * slope
            if of_query is not None:
                part = (of_scores @ some_keys * scale).reshape(batch, heads, end - first, head_dim)
                of_query[:, :, first:end] = part.to(query.dtype)
            if of_keys is not None:
                of_keys[:, :, low:high] += of_scores.mT @ block * scale
            if of_values is not None:
                of_values[:, :, low:high] += weights.mT @ grads
        first = end
    return (
        of_query,
        None if of_keys is None else of_keys.to(key.dtype),
        None if of_values is None else of_values.to(value.dtype),
    )


def _rows_of_a_block(grad_output: torch.Tensor, call: Recorded, window: tuple[int, int]) -> int:
    """Query rows of which all scores have room. A window's block has rows + left + right keys.

    One where something is not finite, on the CPU: a row alone meets no key that is hidden from it, so that nothing of
    such a key gets into a gradient.
    """
    tensors = grad_output, call.query, call.key, call.value
    if call.query.is_cpu and not all(bool(tensor.isfinite().all()) for tensor in tensors):
        return 1
    batch, heads, _, _ = call.query.shape
    room = _BLOCK_SCORES // max(batch * heads, 1)
    rows = room // max(call.key.shape[2], 1)
    if min(window) >= 0:
        beside = sum(window)
        fitting = (math.isqrt(beside * beside + 4 * room) - beside) // 2
        rows = min(max(rows, fitting), max(beside, _FEW_ROWS))
    return max(_LEAST_ROWS, rows)


def _hidden(
    first: int, end: int, low: int, high: int, window: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """(rows, keys): of rows at positions from first to end, the keys from low to high that they do not see."""
    left, right = window
    position = torch.arange(first, end, dtype=torch.int64, device=device)[:, None]
    key = torch.arange(low, high, dtype=torch.int64, device=device)
    hidden = torch.zeros(end - first, high - low, dtype=torch.bool, device=device)
    if left >= 0:
        hidden |= key < position - left
    if right >= 0:
        hidden |= key > position + right
    return hidden
