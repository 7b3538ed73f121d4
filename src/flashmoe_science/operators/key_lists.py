"""``torch.ops.flashmoe_science.key_lists``: a mask of few queries as the keys that each of them sees."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.cuda import key_lists as cuda
from flashmoe_science.errors import InputError
from flashmoe_science.operators.library import define
from flashmoe_science.operators.recording import below_autograd

Lists = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def composed(seen: torch.Tensor, pitch: int) -> Lists:
    """`KEY_LISTS` by PyTorch's operations, none of which waits for the device."""
    batch, seqlen_q, seqlen_k = seen.shape
    device = seen.device
    numbers = torch.arange(seqlen_k, dtype=torch.int32, device=device)
    rows = torch.arange(batch, dtype=torch.int32, device=device)[:, None, None] * pitch + numbers
    # Where each goes; what is hidden goes to a place behind the last, where nobody looks.
    places = torch.where(seen, seen.cumsum(2) - 1, seqlen_k)
    keys = torch.zeros((batch, seqlen_q, seqlen_k + 1), dtype=torch.int32, device=device)
    keys = keys.scatter(2, places, rows.expand(batch, seqlen_q, seqlen_k))
    return (
        keys.view(batch * seqlen_q, seqlen_k + 1),
        seen.sum(2, dtype=torch.int32).view(batch * seqlen_q),
        torch.arange(batch * seqlen_q + 1, dtype=torch.int32, device=device),
    )


def _on_cpu(seen: torch.Tensor, pitch: int) -> Lists:
    _check(seen)
    keys, counts, starts = composed(seen, pitch)
    return keys[:, :-1].contiguous(), counts, starts


def _on_cuda(seen: torch.Tensor, pitch: int) -> Lists:
    _check(seen)
    return cuda.key_lists(seen, pitch)


def _check(seen: torch.Tensor) -> None:
    if seen.dtype is not torch.bool or seen.dim() != 3 or seen.numel() == 0:
        raise InputError(
            f"mask is {tuple(seen.shape)} of {seen.dtype}; "
            "expected booleans (batch, seqlen_q, seqlen_k), with at least one of each"
        )


def _fake(seen: torch.Tensor, pitch: int) -> Lists:
    batch, seqlen_q, seqlen_k = seen.shape
    rows = batch * seqlen_q
    keys, counts, starts = (
        seen.new_empty(shape, dtype=torch.int32) for shape in ((rows, seqlen_k), (rows,), (rows + 1,))
    )
    return keys, counts, starts


def _recorded(*arguments: Any) -> Any:
    return below_autograd(KEY_LISTS, *arguments)


KEY_LISTS = define(
    "key_lists(Tensor seen, SymInt pitch) -> (Tensor keys, Tensor counts, Tensor starts)",
    cpu=_on_cpu,
    cuda=_on_cuda,
    fake=_fake,
    recorded=_recorded,
    flops="it computes with whole numbers alone",
    sharding=None,
)
"""Which keys each query of a mask sees.

Args:
    seen: (batch, seqlen_q, seqlen_k), bool, any strides; True where a key is seen.
    pitch: rows of keys from one sequence to the next.

Returns:
    keys (batch * seqlen_q, seqlen_k) int32, b * pitch + j for each key j that a row of sequence b sees, in order, then
    0; counts (batch * seqlen_q) int32; starts (batch * seqlen_q + 1) int32, 0, 1, 2, ...

Raises:
    InputError: a mask of another form.
"""
