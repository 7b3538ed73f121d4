"""``torch.ops.flashmoe_science.attention_listed_keys``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashmoe_science.errors import InputError
from flashmoe_science.operators.attention_rules import forward_flops
from flashmoe_science.operators.library import define
from flashmoe_science.operators.recording import below_autograd, is_recorded, reject_tangents
from flashmoe_science.varlen.arguments import Inputs, Options
from flashmoe_science.varlen.launch import launch, reject_gradients


class Rows(NamedTuple):
    """How rows of keys or values lie in memory, in elements: row j of sequence b is (b * pitch + j) * stride away."""

    pitch: int
    stride: int
    head: int
    """From one head's row to the next head's."""


def rows_of(tensor: torch.Tensor) -> Rows | None:
    """Those of (batch, heads, seqlen, head_dim); None if they lie otherwise."""
    batch, heads, seqlen, head_dim = tensor.shape
    of_batch, of_head, of_row, _ = tensor.stride()
    if heads == 1:
        of_head = head_dim
    if seqlen == 1:
        return Rows(1, of_batch if batch > 1 else head_dim, of_head)
    if batch == 1:
        return Rows(0, of_row, of_head)
    if of_row <= 0 or of_batch % of_row != 0:
        return None
    return Rows(of_batch // of_row, of_row, of_head)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    pitch: int,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Attention in which each query row has a list of the keys that it sees, on the device: nothing is read back.

    Args:
        query: (batch, heads, seqlen_q, head_dim).
        key, value: (batch, kv_heads, seqlen_k, head_dim), whose rows lie as `rows_of` says, with one pitch.
        keys: (batch * seqlen_q, seqlen_k) int32: b * pitch + j for each key j that a row of sequence b sees, in any
            order; what is behind a row's count is not read.
        counts: (batch * seqlen_q) int32, how many each row sees. None of them: the result is zero.
        starts: (batch * seqlen_q + 1) int32, 0, 1, 2, ...
        pitch: as of `rows_of`.
        softmax_scale: 1 / sqrt(head_dim) if None.

    Returns:
        (batch, heads, seqlen_q, head_dim), whose memory is that of (batch, seqlen_q, heads, head_dim).

    Each query is a sequence of `attention_varlen`, and each key a page of its own.
    """
    batch, heads, seqlen_q, head_dim = query.shape
    inputs = Inputs(
        query.transpose(1, 2).reshape(batch * seqlen_q, heads, head_dim),
        _pages(key, pitch),
        _pages(value, pitch),
        starts,
        None,
        keys,
        counts,
        None,
        None,
        None,
    )
    options = Options(False, (-1, -1), 0.0, softmax_scale, None, False)
    output, _ = launch(inputs, options, 1, key.shape[2])
    return output.view(batch, seqlen_q, heads, head_dim).transpose(1, 2)


def _pages(tensor: torch.Tensor, pitch: int) -> torch.Tensor:
    """(rows, 1, heads, head_dim), from the first row of the first sequence to the last one of the last."""
    rows = rows_of(tensor)
    if rows is None or rows.pitch != pitch:
        raise InputError(
            f"keys or values have strides {tensor.stride()}; expected a pitch of {pitch} rows between sequences"
        )
    batch, heads, seqlen, head_dim = tensor.shape
    return tensor.as_strided(
        ((batch - 1) * pitch + seqlen, 1, heads, head_dim), (rows.stride, rows.stride, rows.head, 1)
    )


def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    pitch: int,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    batch, heads, seqlen_q, head_dim = query.shape
    return query.new_empty((batch, seqlen_q, heads, head_dim)).transpose(1, 2)


def _recorded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> Any:
    reject_tangents("attention_listed_keys", query, key, value)
    if is_recorded(query, key, value):
        reject_gradients(query, key, value)
    return below_autograd(LISTED_KEYS, query, key, value, *others)


LISTED_KEYS = define(
    "attention_listed_keys(Tensor query, Tensor key, Tensor value, Tensor keys, Tensor counts, Tensor starts,"
    " SymInt pitch, float? softmax_scale=None) -> Tensor",
    cpu=attend,
    cuda=attend,
    fake=_fake,
    recorded=_recorded,
    flops=forward_flops,
    sharding=None,
)
"""See `attend`."""
