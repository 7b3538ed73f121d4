"""Batches of `serving.py`: a cache that is read as packed keys, as pages and as dense tensors, and float64 for it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_PAGE = 64
CHECKED_SEQUENCES, CHECKED_ROWS = 4, 8
"""Of a batch, and at either end of a sequence, are compared with float64."""
FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
EXPECTED = 4.5
"""Largest magnitude of normal values that a scale is made for."""


@dataclass(frozen=True)
class Batch:
    """query (tokens, heads, dim); key and value are rows (slots, kv_heads, dim), the same however they are read."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    query: Tensor
    key: Tensor
    value: Tensor
    starts_q: Tensor
    starts_k: Tensor
    lengths: Tensor
    tables: dict[int, Tensor]
    """By page size: (batch, pages) int32, pages in any order."""
    scale: Tensor | None = None
    """(kv_heads,), of key and value in FP8."""

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def dim(self) -> int:
        return self.query.shape[2]

    @property
    def bytes_of_keys(self) -> int:
        """Of keys and values that are there."""
        return 2 * sum(self.keys) * self.kv_heads * self.dim * self.key.element_size()

    def pages(self, page: int) -> tuple[Tensor, Tensor]:
        """key and value as (pages, page, kv_heads, dim): views."""
        shape = (-1, page, self.kv_heads, self.dim)
        return self.key.view(shape), self.value.view(shape)

    def dense(self, *, heads_first: bool) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value of equal sequences as (batch, heads, seqlen, dim).

        Args:
            heads_first: each head's keys lie one after another; else each key's heads, as in the cache.
        """
        batch, queries, keys = len(self.keys), self.queries[0], self.keys[0]
        query = self.query.view(batch, queries, self.heads, self.dim).transpose(1, 2)
        if heads_first:
            key, value = (
                rows[: batch * keys].view(batch, self.kv_heads, keys, self.dim)
                for rows in (self.key, self.value)
            )
            return query.contiguous(), key, value
        key, value = (
            rows[: batch * keys].view(batch, keys, self.kv_heads, self.dim).transpose(1, 2)
            for rows in (self.key, self.value)
        )
        return query, key, value

    def wide(self) -> Batch:
        """The same keys in the query's dtype."""
        assert self.scale is not None
        key, value = (
            (rows.float() * self.scale[:, None]).to(self.query.dtype) for rows in (self.key, self.value)
        )
        return Batch(
            self.queries,
            self.keys,
            self.query,
            key,
            value,
            self.starts_q,
            self.starts_k,
            self.lengths,
            self.tables,
        )


def make(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    seed: int,
    pages: tuple[int, ...] = (),
    fp8: bool = False,
    device: str = "cuda",
) -> Batch:
    """Standard normal values in bfloat16, or keys and values of e4m3 with a scale for each head."""
    generator = torch.Generator(device=device).manual_seed(seed)
    padded = [-(-length // LARGEST_PAGE) * LARGEST_PAGE for length in keys]

    def normal(rows: int, heads_of: int) -> Tensor:
        shape = (rows, heads_of, dim)
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    def starts(lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)

    slots = sum(padded)
    key, value = normal(slots, kv_heads), normal(slots, kv_heads)
    scale = None
    if fp8:
        usual = EXPECTED / LARGEST_FP8
        scale = torch.linspace(usual, 1.25 * usual, kv_heads, dtype=torch.float32, device=device)
        key, value = (
            (rows.float() / scale[:, None]).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8) for rows in (key, value)
        )
    return Batch(
        queries,
        keys,
        normal(sum(queries), heads),
        key,
        value,
        starts(queries),
        starts(keys),
        torch.tensor(keys, dtype=torch.int32, device=device),
        {page: _table(keys, slots, page, seed, device) for page in pages},
        scale,
    )


def _table(keys: tuple[int, ...], slots: int, page: int, seed: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed + page)
    order = torch.randperm(slots // page, generator=generator).to(torch.int32)
    counts = [-(-length // page) for length in keys]
    table = torch.zeros((len(keys), max(counts)), dtype=torch.int32)
    first = 0
    for row, count in enumerate(counts):
        table[row, :count] = order[first : first + count]
        first += count
    return table.to(device)


KeysOf = Callable[[int, int], tuple[Tensor, Tensor]]
"""Of a sequence and a key/value head: keys and values in float64, (keys, dim)."""


def keys_of(batch: Batch, page: int) -> KeysOf:
    """Of the cache in pages of this size; 0: packed."""

    def rows(sequence: int, head: int) -> tuple[Tensor, Tensor]:
        length = batch.keys[sequence]
        position = torch.arange(length, device=batch.key.device)
        if page:
            slots = batch.tables[page][sequence, position // page].long() * page + position % page
        else:
            slots = int(batch.starts_k[sequence]) + position
        factor = 1.0 if batch.scale is None else float(batch.scale[head])
        return batch.key[slots, head].double() * factor, batch.value[slots, head].double() * factor

    return rows


def keys_of_dense(batch: Batch) -> KeysOf:
    """Of dense tensors whose heads come first."""
    _, key, value = batch.dense(heads_first=True)
    return lambda sequence, head: (key[sequence, head].double(), value[sequence, head].double())


def error(
    batch: Batch,
    output: Tensor,
    keys: KeysOf,
    *,
    causal: bool = True,
    window: int = -1,
    sinks: Tensor | None = None,
) -> float:
    """Root mean square of the difference from float64 over that of float64: the largest of the sequences looked at.

    Args:
        output: (tokens, heads, dim).
    """
    count = len(batch.keys)
    worst = 0.0
    for sequence in sorted({0, count // 3, count // 2, count - 1})[:CHECKED_SEQUENCES]:
        queries, length = batch.queries[sequence], batch.keys[sequence]
        rows = sorted({*range(min(CHECKED_ROWS, queries)), *range(max(0, queries - CHECKED_ROWS), queries)})
        row = torch.tensor(rows, device=batch.query.device)
        at = int(batch.starts_q[sequence]) + row
        position, column = row[:, None] + length - queries, torch.arange(length, device=row.device)
        hidden = torch.zeros(len(rows), length, dtype=torch.bool, device=row.device)
        if causal:
            hidden |= column > position
        if window >= 0:
            hidden |= column < position - window
        right, wrong = 0.0, 0.0
        group = batch.heads // batch.kv_heads
        for head in range(batch.heads):
            if head % group == 0:
                key, value = keys(sequence, head // group)
            scores = (batch.query[at, head].double() @ key.T * batch.dim**-0.5).masked_fill(hidden, -math.inf)
            highest = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - highest)
            total = weights.sum(-1, keepdim=True)
            if sinks is not None:
                total += torch.exp(sinks[head].double() - highest)
            truth = weights @ value / total
            right += float(truth.square().sum())
            wrong += float((output[at, head].double() - truth).square().sum())
        worst = max(worst, math.sqrt(wrong / right) if math.isfinite(wrong) else math.inf)
    return worst
