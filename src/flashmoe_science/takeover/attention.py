"""A call of attention in PyTorch's terms, on the kernels: what it comes to, or why it is left alone."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from flashmoe_science import autocast
from flashmoe_science.attention import flash_attention
from flashmoe_science.takeover.availability import REFUSALS, failed, why_no_attention, why_no_lists
from flashmoe_science.takeover.capture import make_ready
from flashmoe_science.takeover.conditions import why_not, why_not_plain
from flashmoe_science.takeover.key_lists import over_lists, why_not_listed
from flashmoe_science.takeover.masks import Range, key_ranges, uniform
from flashmoe_science.takeover.repeated import remember, repeat

_failures: dict[tuple[str, torch.dtype, int], str] = {}
_failures_with_options: dict[tuple[str, torch.dtype, int], str] = {}


def attempt(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
    lower_right: bool = False,
) -> torch.Tensor | str:
    """The output, or in a few words why the kernels do not take the call. Raises nothing of its own.

    Args:
        query: (batch, heads, seqlen_q, head_dim).
        key, value: (batch, kv_heads, seqlen_k, head_dim).
        attn_mask: None, or booleans, True where a key is seen, that broadcast to (batch, heads, seqlen_q, seqlen_k).
        is_causal: query row i sees the keys 0 to i: PyTorch's rule, aligned top-left.
        grouped: whether several query heads may share a key head.
        lower_right: a causal call is aligned bottom-right instead, as FlashAttention's are.
    """
    compiling = is_dynamo_compiling()
    if attn_mask is None and dropout_p == 0 and not compiling:
        output = repeat(query, key, value, causal=is_causal, scale=scale, grouped=grouped)
        if output is not None:
            return output
    reason = why_not_without_mask(
        query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale, grouped=grouped
    )
    if reason is not None:
        return reason
    ranges: tuple[Range, ...] | None = None
    if attn_mask is not None:
        if is_causal:
            return "a mask in a causal call"
        seen = _ranges_of(attn_mask, query, key, value, compiling)
        if isinstance(seen, str):
            return seen
        ranges = seen
    shorter = is_causal and query.shape[2] < key.shape[2]
    if shorter and not lower_right:
        # No row sees the keys behind the last query; of what is left the two alignments are one.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if compiling:
        if attn_mask is not None:
            failure = why_no_lists(query.device.type, query.dtype)
            return failure or over_lists(query, key, value, attn_mask, scale)
        failure = why_no_attention(query.device.type, query.dtype)
        return failure or _output(query, key, value, is_causal, scale)
    kernel = query.device.type, query.dtype, query.shape[3]
    if kernel in _failures:
        return _failures[kernel]
    try:
        if attn_mask is not None and ranges is None:
            return over_lists(query, key, value, attn_mask, scale)
        if ranges is None:
            output = _output(query, key, value, is_causal, scale)
            if output.is_cuda and not shorter:
                remember(query, key, value, causal=is_causal, scale=scale, grouped=grouped)
            return output
        if query.is_cuda:
            make_ready(query.device, query.dtype)
        return _over_ranges(query, key, value, ranges, scale)
    except REFUSALS as error:
        return failed(_failures, kernel, error)


def attempt_with_options(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    dropout_p: float,
    scale: float | None,
) -> torch.Tensor | str:
    """As `attempt`, without a mask.

    Args:
        causal: aligned bottom-right.
        window: how many keys before its own a query sees, in a causal call; -1: all.
        softcap: 0 for none.
        sinks: (heads,), of any floating dtype.
    """
    reason = why_not_without_mask(
        query, key, value, dropout_p=dropout_p, is_causal=causal, scale=scale, grouped=True
    )
    if reason is not None:
        return reason
    if is_dynamo_compiling() and (failure := why_no_attention(query.device.type, query.dtype)):
        return failure
    kernel = query.device.type, query.dtype, query.shape[3]
    if not is_dynamo_compiling() and kernel in _failures_with_options:
        return _failures_with_options[kernel]
    try:
        output = flash_attention(
            query,
            key,
            value,
            causal=causal,
            window=(window, -1),
            softcap=softcap,
            sinks=None if sinks is None else sinks.float(),
            softmax_scale=scale,
        )
    except REFUSALS as error:
        return failed(_failures_with_options, kernel, error)
    assert isinstance(output, torch.Tensor)
    return output


def as_autocast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As autocast gives them to PyTorch's own function, which is in its list. What is declined in any case stays as it
    is: a subclass or a mode would see the cast."""
    if (is_dynamo_compiling() or autocast.is_on()) and why_not_plain(query, key, value) is None:
        query, key, value = autocast.cast(query, key, value)
    return query, key, value


def _ranges_of(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, compiling: bool
) -> tuple[Range, ...] | str | None:
    """Which keys the mask shows; None if nobody is to look, as lists do without; or why it is not taken.

    Under torch.compile nobody can look, and on a GPU it takes waiting. Lists are for few queries.
    """
    if type(mask) is not torch.Tensor or mask.layout is not torch.strided:
        return "a mask that is no plain tensor"
    if compiling or mask.is_cuda:
        reason = why_not_listed(query, key, value, mask)
        if reason is None or compiling:
            return reason and f"{reason}, under torch.compile"
    batch, heads, seqlen_q, _ = query.shape
    ranges = key_ranges(mask, (batch, heads, seqlen_q, key.shape[2]))
    if not isinstance(ranges, str) and not uniform(ranges) and not query.is_cpu:
        return "a mask with different lengths on a GPU"
    return ranges


def why_not_without_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
) -> str | None:
    """Why the kernels do not take a call, whatever its mask; None if they do. Arguments as in `attempt`."""
    if dropout_p != 0:
        return "dropout"
    reason = why_not(query, key, value, scale, grouped=grouped)
    if reason is not None:
        return reason
    if is_causal is not True and is_causal is not False:
        return "is_causal is no bool"
    if is_causal and query.shape[2] > key.shape[2]:
        return "more queries than keys in a causal call"
    return None


def _output(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    output = flash_attention(query, key, value, causal=causal, softmax_scale=scale)
    assert isinstance(output, torch.Tensor)
    return output


def _over_ranges(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ranges: tuple[Range, ...],
    scale: float | None,
) -> torch.Tensor:
    """Each sequence of the batch over its own keys; in one call if they are the same."""
    if uniform(ranges):
        start, stop = ranges[0]
        return _output(query, key[:, :, start:stop], value[:, :, start:stop], False, scale)
    # Not by slices of the batch, each of whose gradients would be as large as the whole.
    rows = zip(query.unbind(), key.unbind(), value.unbind(), ranges, strict=True)
    outputs = [
        _output(q[None], k[None, :, start:stop], v[None, :, start:stop], False, scale)
        for q, k, v, (start, stop) in rows
    ]
    if query.stride(1) < query.stride(2):
        # Heads within rows, as the queries lie: a model may view PyTorch's result as (batch, seqlen, hidden).
        return torch.cat([output.transpose(1, 2) for output in outputs]).transpose(1, 2)
    return torch.cat(outputs)
