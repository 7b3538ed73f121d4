"""Masks of few queries as lists of the keys that each query sees: made on the device, whatever the mask says.

A step of generation with a static cache has one query for each sequence, and a mask over all of the cache. Which keys
it shows is known on the device alone, and under torch.compile nobody can look. Lists need nobody to: a query's keys are
the pages of a sequence of `attention_varlen`, and the cost is that of the keys that are seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.weak import WeakIdKeyDictionary

from flashmoe_science.cuda.key_lists import is_asked_for
from flashmoe_science.cuda.repeat import raw_stream
from flashmoe_science.direct import are_direct
from flashmoe_science.operators.key_lists import KEY_LISTS, composed
from flashmoe_science.operators.listed_keys import LISTED_KEYS, attend, rows_of
from flashmoe_science.takeover.tracing import constant_result

_MOST_ENTRIES = 1 << 14
"""Of the lists of several queries, which read a key that they share once for each; a single query's has no limit."""
_MOST_ROWS = 1 << 31
"""Rows of keys are numbered by int32."""
_ALIGNED = 8
"""Elements of two bytes between rows on a GPU."""


class Lists(NamedTuple):
    """The arguments of `operators.listed_keys.attend` that follow from a mask."""

    keys: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor


@dataclass(frozen=True)
class _Made:
    version: int
    """Of the mask's contents when the lists were made."""
    pitch: int
    shape: tuple[int, int]
    """Of the batch and the queries that they were made for."""
    stream: int
    """On which: another one's launches do not wait for it."""
    lists: Lists


_made: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By mask: the layers of a step share one."""


def why_not_listed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> str | None:
    """Why a call that `conditions.why_not` takes is not computed by lists; None if it is. Reads no contents.

    Args:
        mask: True where a key is seen; broadcasts to (batch, heads, seqlen_q, seqlen_k).
    """
    if mask.dtype is not torch.bool:
        return "a mask that is added"
    batch, heads, seqlen_q, _ = query.shape
    seqlen_k = key.shape[2]
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(shape) != 4 or shape[3] != seqlen_k:
        return "a mask that broadcasts otherwise"
    if shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2] not in (1, seqlen_q):
        return "a mask that broadcasts otherwise"
    if shape[1] != 1 and mask.stride(-3) != 0:
        return "a mask with rows of its own for heads"
    if seqlen_q > 1 and batch * seqlen_q * seqlen_k > _MOST_ENTRIES:
        return "a mask of many queries"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return "a mask where a gradient is needed"
    of_key, of_value = rows_of(key), rows_of(value)
    if of_key is None or of_value is None or of_key.pitch != of_value.pitch:
        return "keys and values in different layouts"
    if (batch - 1) * of_key.pitch + seqlen_k >= _MOST_ROWS:
        return "too many keys"
    if query.is_cuda:
        for stride in (of_key.stride, of_key.head, of_value.stride, of_value.head):
            if stride % _ALIGNED != 0:
                return "rows not aligned to 16 bytes"
    return None


def over_lists(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """The output of a call that `why_not_listed` has nothing against."""
    rows = rows_of(key)
    assert rows is not None
    if is_dynamo_compiling():
        lists = lists_of(mask, query.shape[0], query.shape[2], rows.pitch)
    else:
        lists = _lists_once(mask, query, rows.pitch)
        if are_direct(query, key, value):
            return attend(query, key, value, *lists, rows.pitch, scale)
    output: torch.Tensor = LISTED_KEYS(query, key, value, *lists, rows.pitch, scale)
    # PyTorch's result lies as its queries do on a CPU, and heads within rows on a GPU: models view it so.
    return output.contiguous() if query.is_cpu and query.stride(1) >= query.stride(2) else output


def lists_of(mask: torch.Tensor, batch: int, seqlen_q: int, pitch: int) -> Lists:
    """None of it waits for the device."""
    seqlen_k = mask.shape[-1]
    seen = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))[:, 0]
    seen = seen.expand(batch, seqlen_q, seqlen_k)
    if mask.is_cuda and _fused():
        return Lists(*KEY_LISTS(seen, pitch))
    return Lists(*composed(seen, pitch))


@constant_result
def _fused() -> bool:
    return is_asked_for()


def _lists_once(mask: torch.Tensor, query: torch.Tensor, pitch: int) -> Lists:
    """Once for the layers of a step; anew while a graph is captured, as the mask may be another at each replay."""
    shape = query.shape[0], query.shape[2]
    if mask.is_inference() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return lists_of(mask, *shape, pitch)  # the writes of inference tensors are not counted
    made = _made.get(mask)  # type: ignore[no-untyped-call]
    like = mask._version, pitch, shape, _stream_of(mask)
    if made is None or (made.version, made.pitch, made.shape, made.stream) != like:
        made = _made[mask] = _Made(*like, lists_of(mask, *shape, pitch))
    lists: Lists = made.lists
    return lists


def _stream_of(tensor: torch.Tensor) -> int:
    """The current one of its device; 0 on a CPU."""
    return raw_stream(tensor.get_device()) if tensor.is_cuda else 0
