"""Dense tensors as those of `attention_varlen`, where their strides allow it. Nothing is copied."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashmoe_science.varlen.problem import Problem, Sizes

_MOST_TOKENS = 1 << 31
"""Lengths are int32."""


class View(NamedTuple):
    """What `torch.Tensor.as_strided` takes."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Lengths(NamedTuple):
    """The numbers of the tensors of `varlen.problem.Tensors` that have these names; None for one that is not there."""

    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...] | None = None
    pages: tuple[int, ...] | None = None
    """Of ``block_table``, which has one column."""
    seqused_k: tuple[int, ...] | None = None


class Sequences(NamedTuple):
    """How tensors (batch, heads, seqlen, head_dim) are seen.

    Each element of the batch is a sequence, whose keys may be one page, or all of them are heads of one sequence.
    """

    query: View
    key: View
    value: View
    output: View
    sizes: Sizes
    heads_of: int
    """Elements of the batch whose heads stand side by side: sinks are repeated as often."""
    page_size: int
    """0: keys are packed."""
    lengths: Lengths

    def problem(
        self,
        dtype: torch.dtype,
        *,
        window: tuple[int, int],
        softcap: float,
        softmax_scale: float,
        sinks: bool,
        return_lse: bool,
    ) -> Problem:
        """What `attention_varlen` is asked for. ``softmax_scale`` is positive."""
        key, value = (
            view.strides[:3] if self.page_size else (0, *view.strides[:2]) for view in (self.key, self.value)
        )
        return Problem(
            dtype=dtype,
            num_heads=self.query.sizes[1],
            num_kv_heads=self.key.sizes[-2],
            head_dim=self.query.sizes[2],
            value_dim=self.value.sizes[-1],
            page_size=self.page_size,
            query_strides=(self.query.strides[0], self.query.strides[1]),
            key_strides=(key[0], key[1], key[2]),
            value_strides=(value[0], value[1], value[2]),
            output_strides=(self.output.strides[0], self.output.strides[1]),
            window_left=window[0],
            window_right=window[1],
            softmax_scale=softmax_scale,
            softcap=softcap,
            sinks=sinks,
            alibi=False,
            used_keys=self.page_size > 0,
            split_keys=0,
            return_lse=return_lse,
        )

    def dense_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """(tokens, heads) as (batch, heads, seqlen_q), contiguous."""
        tokens, heads = lse.shape
        if self.heads_of > 1:
            return lse.view(tokens, self.heads_of, heads // self.heads_of).permute(1, 2, 0).contiguous()
        batch = self.sizes.batch
        return lse.view(batch, tokens // batch, heads).transpose(1, 2).contiguous()


def as_sequences(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
) -> Sequences | None:
    """How dense tensors with elements are seen; None where their strides do not allow it.

    ``output`` may be on the device ``meta``. All are (batch, heads, seqlen, head_dim), key and value of one shape.
    """
    batch, _, seqlen_q, _ = query.shape
    seqlen_k = key.shape[2]
    if batch * max(seqlen_q, seqlen_k) >= _MOST_TOKENS:
        return None
    of_query, of_output, of_key, of_value = (_tokens(tensor) for tensor in (query, output, key, value))
    if of_query is not None and of_output is not None and of_key is not None and of_value is not None:
        lengths = Lengths(_multiples(batch, seqlen_q), _multiples(batch, seqlen_k))
        sizes = Sizes(batch, seqlen_q, seqlen_k)
        return Sequences(of_query, of_key, of_value, of_output, sizes, 1, 0, lengths)
    q, k, v, out = (_heads(tensor) for tensor in (query, key, value, output))
    if q is not None and k is not None and v is not None and out is not None:
        lengths = Lengths((0, seqlen_q), (0, seqlen_k))
        return Sequences(q, k, v, out, Sizes(1, seqlen_q, seqlen_k), batch, 0, lengths)
    if of_query is not None and of_output is not None:
        lengths = Lengths(
            _multiples(batch, seqlen_q),
            pages=tuple(range(batch)),
            seqused_k=(seqlen_k,) * batch,
        )
        sizes = Sizes(batch, seqlen_q, seqlen_k)
        return Sequences(of_query, _pages(key), _pages(value), of_output, sizes, 1, seqlen_k, lengths)
    return None


def _multiples(batch: int, seqlen: int) -> tuple[int, ...]:
    return tuple(range(0, batch * seqlen + 1, seqlen))


def _tokens(tensor: torch.Tensor) -> View | None:
    """(batch * seqlen, heads, head_dim)."""
    batch, heads, seqlen, head_dim = tensor.shape
    of_batch, of_head, of_row, _ = tensor.stride()
    stride = _merged(batch, of_batch, seqlen, of_row)
    if heads == 1:
        of_head = head_dim  # nothing steps along it, but kernels ask whether rows are aligned
    return None if stride is None else View((batch * seqlen, heads, head_dim), (stride, of_head, 1))


def _heads(tensor: torch.Tensor) -> View | None:
    """(seqlen, batch * heads, head_dim)."""
    batch, heads, seqlen, head_dim = tensor.shape
    of_batch, of_head, of_row, _ = tensor.stride()
    stride = _merged(batch, of_batch, heads, of_head)
    if seqlen == 1:
        of_row = batch * heads * head_dim  # likewise
    return None if stride is None else View((seqlen, batch * heads, head_dim), (of_row, stride, 1))


def _pages(tensor: torch.Tensor) -> View:
    """(batch, seqlen, heads, head_dim)."""
    transposed = tensor.transpose(1, 2)
    return View(tuple(transposed.shape), (*transposed.stride()[:3], 1))


def _merged(outer: int, outer_stride: int, inner: int, inner_stride: int) -> int | None:
    """The stride of two dimensions as one; None if they have none."""
    if outer == 1:
        return inner_stride
    if inner == 1:
        return outer_stride
    return inner_stride if outer_stride == inner * inner_stride else None
