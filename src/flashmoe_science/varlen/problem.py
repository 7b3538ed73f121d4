"""What a call of attention over sequences of any lengths asks for: what both backends are given.

`Problem` is everything that a plan may depend on. Lengths, the number of sequences and of pages are not in it: a decode
loop, in which they change at every step, has one `Problem`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch

Strides = tuple[int, int, int]


class Quantized(NamedTuple):
    """A cache of `torch.float8_e4m3fn`: how far it is, in elements, to the scale of the next (page, token, head).

    0 where they share one; the first is 0 where keys are packed. None: all scales are 1.
    """

    key_scale: Strides | None
    value_scale: Strides | None


class Only(IntEnum):
    """Which sequences are computed. Rows of others stay as they are, for another launch of the same call."""

    ALL = 0
    ONE_TOKEN = 1
    OTHERS = 2
    """Than those of one token."""


@dataclass(frozen=True)
class Problem:
    """A call that was checked, without its sizes. Strides are in elements; last dimensions are contiguous."""

    dtype: torch.dtype
    """Of query and output, and of key and value unless `quantized`: float32, bfloat16 or float16."""
    num_heads: int
    num_kv_heads: int
    """Query head h uses key/value head h // (num_heads // num_kv_heads)."""
    head_dim: int
    """Of query and key; a multiple of 8."""
    value_dim: int
    """Of value and output; a multiple of 8."""
    page_size: int
    """Tokens of a page, any number of them; 0: keys are packed."""
    query_strides: tuple[int, int]
    """(token, head)."""
    key_strides: tuple[int, int, int]
    """(page, token, head); the first is 0 where keys are packed."""
    value_strides: tuple[int, int, int]
    """Likewise."""
    output_strides: tuple[int, int]
    """(token, head)."""
    window_left: int
    """Query i of a sequence sees key j only if j >= i + seqlen_k - seqlen_q - window_left; -1: no such limit."""
    window_right: int
    """... and only if j <= i + seqlen_k - seqlen_q + window_right; -1: no such limit; 0: causal."""
    softmax_scale: float
    """Positive."""
    softcap: float
    """Scores become softcap * tanh(score / softcap); 0: they stay."""
    sinks: bool
    """Whether `Tensors.sinks` is there."""
    alibi: bool
    """Whether `Tensors.alibi_slopes` is there."""
    used_keys: bool
    """Whether `Tensors.seqused_k` is there: always where keys lie in pages."""
    split_keys: int
    """Partial sums begin at every multiple of this many keys of a sequence, whatever the batch; 0: anywhere."""
    return_lse: bool
    quantized: Quantized | None = None
    """What key and value are, if not of `dtype`."""
    chunk: int = 0
    """A query at position p sees key j only if j // chunk == p // chunk; 0: no such limit."""
    tree: bool = False
    """Whether `Tensors.tree_mask` is there."""
    only: Only = Only.ALL
    """A caller asks for all. On CUDA a call with `split_keys` may be two launches: `cuda.varlen.select.launched`."""


class Tensors(NamedTuple):
    """The tensors of a call, on one device. Lengths are int32, contiguous, and no host code reads them."""

    query: torch.Tensor
    """(tokens, num_heads, head_dim)."""
    key: torch.Tensor
    """(keys, num_kv_heads, head_dim), or in pages (pages, page_size, num_kv_heads, head_dim)."""
    value: torch.Tensor
    """Like key, with value_dim."""
    output: torch.Tensor
    """(tokens, num_heads, value_dim), to be written whole: rows of no sequence with zeros."""
    lse: torch.Tensor | None
    """(tokens, num_heads) float32, contiguous, to be written whole: minus infinity for rows without keys and of no
    sequence.
    """
    cu_seqlens_q: torch.Tensor
    """(batch + 1): the first row of each sequence, and the end of the last; begins with 0 and never falls."""
    cu_seqlens_k: torch.Tensor | None
    """(batch + 1): the same of packed keys; None where they lie in pages."""
    block_table: torch.Tensor | None
    """(batch, most pages): which page holds keys [p * page_size, (p + 1) * page_size) of a sequence. Rows may have any
    stride. What is behind a sequence's length is garbage. None where keys are packed.
    """
    seqused_k: torch.Tensor | None
    """(batch): how many keys each sequence has. None: packed keys, as many as cu_seqlens_k says."""
    sinks: torch.Tensor | None
    """(num_heads) float32, contiguous."""
    alibi_slopes: torch.Tensor | None
    """(num_heads) or (batch, num_heads) float32; heads are contiguous."""
    key_scale: torch.Tensor | None = None
    """float32, with the strides of `Quantized`: an element of key times its scale is the key."""
    value_scale: torch.Tensor | None = None
    """Likewise."""
    tree_mask: torch.Tensor | None = None
    """(tokens) int64, contiguous: bit j of a row's word: whether the row sees the key of its sequence's query j. Of
    sequences with at most 64 queries.
    """


class Sizes(NamedTuple):
    """What the host knows of lengths."""

    batch: int
    """Sequences; may be 0."""
    max_seqlen_q: int
    """No sequence has more queries."""
    max_seqlen_k: int
    """No sequence has more keys."""


Run = Callable[[Tensors, Sizes], None]
"""Writes output and lse of one call, on PyTorch's current stream; reads nothing back and waits for nothing."""


REPEATED = (
    "query",
    "key",
    "value",
    "out",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_k",
    "block_table",
    "sinks",
    "alibi_slopes",
    "key_scale",
    "value_scale",
    "tree_mask",
)
"""The order in which a `Repeat` gets the tensors that a caller gave: of addresses in CUDA's decode kernel."""


@dataclass(frozen=True)
class Repeat:
    """Makes calls that are like an earlier one, with the same bounds."""

    call: Callable[[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor | None], None]
    """Of the tensors of `REPEATED` that it was given, like the earlier ones in all but addresses and contents, into
    output and lse. The earlier call's device is current.
    """
    target: Any = None
    """The `cuda.steady.Target` of the same launch; None on the CPU."""


@dataclass(frozen=True)
class Repeatable:
    """A `Run` with a shorter way for calls that are like an earlier one."""

    run: Run
    repeat: Callable[[Tensors, Sizes, bool], Repeat | None]
    """The way for calls like this one, which was made, by the thread that asks; None where there is none. The last
    argument: whether the caller gave ``out``.
    """

    def __call__(self, tensors: Tensors, sizes: Sizes) -> None:
        self.run(tensors, sizes)


class Backend(Protocol):
    """What `flashmoe_science.cpu.varlen` and `flashmoe_science.cuda.varlen` provide."""

    def prepare(self, problem: Problem, device: torch.device) -> Run:
        """What makes all calls of a problem. Called once for each, with the device current.

        Raises:
            InputError: strides or dimensions that no kernel takes.
            DeviceError, BuildError: no kernel for this, or it did not compile.
        """
        ...
