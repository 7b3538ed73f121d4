"""A call in a suite's terms, and why it is not raced where it is not. Each problem is looked at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from cudadent42.recording.records import Kind, Sizes
from flashmoe_science.takeover.attention import why_not_without_mask

_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_MOST = 1 << 20
"""Of any size in a suite."""


@dataclass(frozen=True)
class Problem:
    kind: Kind
    what: str
    device: str
    dtype: str
    sizes: Sizes | None
    baseline: str
    reason: str | None
    note: str = ""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    lower_right: bool,
    scale: float | None,
    grouped: bool,
    mask: str | None = None,
    dropout_p: float = 0.0,
    reason: str | None = None,
) -> Problem:
    """Attention over query (batch, heads, seqlen_q, head_dim), key and value (batch, kv_heads, seqlen_k, head_dim).

    Args:
        lower_right: a causal mask is aligned bottom-right, else top-left.
        mask: what kind of mask there is besides; None for none.
        reason: why it is not raced whatever it is.
    """
    reason = reason or why_not_without_mask(
        query,
        key,
        value,
        dropout_p=dropout_p,
        is_causal=causal,
        scale=scale,
        grouped=grouped,
    )
    reason = reason or mask or _why_empty(*query.shape, *key.shape, *value.shape)
    sizes, note = None, ""
    if reason is None:
        sizes, note = _attention_sizes(query, key, value, causal, lower_right, scale)
        if max(int(size) for size in sizes.values() if isinstance(size, int)) > _MOST:
            sizes, reason = None, f"sizes beyond {_MOST:,}, which no suite takes"
    return Problem(
        Kind.ATTENTION,
        f"attention, {_shape(query, key)}" + (" causal" if causal is True else ""),
        query.device.type,
        _dtype(query),
        sizes,
        "pytorch",
        reason,
        note,
    )


def mask_kind(mask: torch.Tensor) -> str:
    """By what costs nothing: its contents, on a GPU, would have to be waited for."""
    if mask.dtype is not torch.bool:
        return "a mask that is added"
    if mask.dim() < 2 or mask.shape[-2] != 1 or (mask.dim() > 2 and mask.shape[-3] != 1):
        return "a mask with rows of its own for heads or queries"
    return "a padding mask, which a suite cannot have"


def _attention_sizes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    lower_right: bool,
    scale: float | None,
) -> tuple[Sizes, str]:
    """And what a case cannot have of it, in words."""
    batch, heads, seqlen_q, head_dim = query.shape
    _, kv_heads, seqlen_k, _ = key.shape
    if causal and not lower_right:
        seqlen_k = min(seqlen_q, seqlen_k)  # no row sees the keys behind
    sizes: Sizes = {"batch": batch, "num_heads": heads}
    if kv_heads != heads:
        sizes["num_kv_heads"] = kv_heads
    if seqlen_q == seqlen_k:
        sizes["seqlen"] = seqlen_q
    else:
        sizes |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    sizes["head_dim"] = head_dim
    if causal:
        sizes["causal"] = True
    if scale is not None and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        sizes["softmax_scale"] = float(scale)
    note = ""
    for name, tensor, shape in (
        ("query", query, (batch, heads, seqlen_q, head_dim)),
        ("key", key, (batch, kv_heads, seqlen_k, head_dim)),
        ("value", value, (batch, kv_heads, seqlen_k, head_dim)),
    ):
        strides = suite_strides(shape, tensor.stride())
        if strides is None:
            note = "memory that entries share (strides of 0), which is contiguous in the case"
        elif strides:
            sizes[f"{name}_strides"] = strides
    return sizes, note


def suite_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Of batch, heads and rows; empty for a contiguous tensor, and None where entries share memory."""
    dense = [math.prod(shape[number + 1 :]) for number in range(3)]
    # The stride of a dimension of size 1 means nothing.
    told = tuple(
        plain if size == 1 else stride
        for size, stride, plain in zip(shape[:3], strides[:3], dense, strict=True)
    )
    if told == tuple(dense):
        return ()
    spanned = shape[3]
    for stride, size in sorted(zip(told, shape[:3], strict=True)):
        if size > 1:
            if stride < spanned:
                return None
            spanned += (size - 1) * stride
    return told


def are_experts(tokens: object, w2: object, ids: object) -> bool:
    """Whether these have the dimensions of `experts`; whoever is called says what is wrong with others."""
    return all(
        isinstance(tensor, torch.Tensor) and tensor.dim() == dimensions
        for tensor, dimensions in ((tokens, 2), (w2, 3), (ids, 2))
    )


def experts(
    tokens: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    top_k: int,
    activation: str | None,
    *,
    baseline: str,
    reason: str | None,
) -> Problem:
    """A mixture of experts over tokens (tokens, hidden), w2 (experts, hidden, intermediate)."""
    count, hidden = tokens.shape
    number, _, intermediate = w2.shape
    if w2.dtype == torch.uint8:  # two weights of 4 bits in a byte
        intermediate *= 2
    sizes: Sizes | None = {
        "tokens": count,
        "hidden": hidden,
        "intermediate": intermediate,
        "experts": number,
        "top_k": top_k,
    }
    if sizes is not None and activation not in (None, "silu"):
        sizes["activation"] = str(activation)
    reason = reason or _why_empty(count, hidden, intermediate, number, top_k)
    if reason is None and max(count, hidden, intermediate, number) > _MOST:
        reason = f"sizes beyond {_MOST:,}, which no suite takes"
    return Problem(
        Kind.EXPERTS,
        f"experts, {count} × {hidden} × {intermediate}, {top_k} of {number}",
        w2.device.type,
        _dtype(w2),
        sizes if reason is None else None,
        baseline,
        reason,
    )


def _why_empty(*sizes: int) -> str | None:
    """A suite's sizes are 1 or more."""
    return "an empty tensor" if 0 in sizes else None


def elsewhere(kind: Kind, what: str, tensor: Any, reason: str) -> Problem:
    """Calls whose tensors are not to be looked into."""
    device = tensor.device.type if isinstance(tensor, torch.Tensor) else "cpu"
    return Problem(kind, what, device, "", None, "", reason)


def _shape(query: torch.Tensor, key: torch.Tensor) -> str:
    if query.dim() != 4 or key.dim() != 4:
        return " × ".join(map(str, query.shape))
    batch, heads, seqlen_q, head_dim = query.shape
    _, kv_heads, seqlen_k, _ = key.shape
    words = f"{heads}" if heads == kv_heads else f"{heads}/{kv_heads}"
    lengths = f"{seqlen_q}" if seqlen_q == seqlen_k else f"{seqlen_q}/{seqlen_k}"
    return f"{batch} × {words} × {lengths} × {head_dim}"


def _dtype(tensor: torch.Tensor) -> str:
    return _DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
