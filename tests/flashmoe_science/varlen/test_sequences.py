"""Dense tensors seen as sequences: which way, and that `attention_varlen`'s CPU kernel computes the same through it."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from dense_options import check_dense
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_science.cpu import varlen as cpu
from flashmoe_science.varlen.problem import Tensors
from flashmoe_science.varlen.sequences import Sequences, as_sequences

ORDERS = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1), "sbhd": (2, 0, 1), "hbsd": (1, 0, 2)}
"""Of the first three dimensions, the outermost first."""
SINKS = torch.tensor([0.0, 2.0, -math.inf, 5.0])
WINDOW = (9, 2)
SCALE = 0.3


class Sizes(NamedTuple):
    batch: int
    heads: int
    seqlen: int
    head_dim: int = 16


def tensor(sizes: Sizes, order: str, spare: int = 0) -> torch.Tensor:
    """Random, with memory in this order and ``spare`` rows after the last one of each sequence."""
    with_spare = sizes._replace(seqlen=sizes.seqlen + spare)
    axes = (*ORDERS[order], 3)
    memory = torch.randn([with_spare[axis] for axis in axes])
    back = [axes.index(axis) for axis in range(4)]
    return memory.permute(back)[:, :, : sizes.seqlen]


def attend(
    seen: Sequences, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
) -> torch.Tensor:
    """The log-sum-exp; the output goes where it belongs."""
    problem = seen.problem(
        query.dtype, window=WINDOW, softcap=0.0, softmax_scale=SCALE, sinks=True, return_lse=True
    )
    tokens, heads, _ = seen.query.sizes
    lse = torch.full((tokens, heads), math.nan)
    starts, *others = (
        None if numbers is None else torch.tensor(numbers, dtype=torch.int32) for numbers in seen.lengths
    )
    key_starts, pages, used = others
    views = (
        each.as_strided(*view)
        for each, view in zip(
            (query, key, value, output), (seen.query, seen.key, seen.value, seen.output), strict=True
        )
    )
    assert starts is not None
    table = None if pages is None else pages[:, None]
    tensors = Tensors(*views, lse, starts, key_starts, table, used, SINKS.repeat(seen.heads_of), None)
    cpu.prepare(problem, query.device)(tensors, seen.sizes)
    return seen.dense_lse(lse)


@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.tuples(st.integers(1, 9), st.integers(1, 30)),
    st.tuples(*[st.sampled_from(sorted(ORDERS))] * 4),
    st.integers(0, 2),
)
def test_is_the_same_attention(
    batch: int, kv_heads: int, lengths: tuple[int, int], orders: tuple[str, str, str, str], spare: int
) -> None:
    of_query, of_keys = Sizes(batch, 4, lengths[0]), Sizes(batch, kv_heads, lengths[1])
    query, output = tensor(of_query, orders[0]), tensor(of_query, orders[3])
    key, value = tensor(of_keys, orders[1], spare), tensor(of_keys, orders[2], spare)
    seen = as_sequences(query, key, value, output)
    if seen is None:
        return
    lse = attend(seen, query, key, value, output.fill_(math.nan))
    check_dense(
        output, lse, (query, key, value), SINKS, causal=False, window=WINDOW, softcap=0.0, softmax_scale=SCALE
    )
    assert lse.is_contiguous()


@pytest.mark.parametrize(
    ("orders", "spare", "batch", "heads_of", "page_size"),
    [
        ("bshd bshd bshd bshd", 0, 3, 1, 0),  # as projections are laid out
        ("bhsd bhsd bhsd bhsd", 0, 1, 3, 0),
        ("bhsd bhsd bhsd bhsd", 2, 1, 3, 0),  # keys of a cache that has room
        ("bshd bhsd bhsd bshd", 0, 3, 1, 30),
        ("bshd bshd bshd bshd", 2, 3, 1, 30),
        ("hbsd hbsd hbsd hbsd", 0, 3, 1, 0),
        ("sbhd sbhd sbhd sbhd", 0, 1, 3, 0),
        ("bhsd bshd bshd bhsd", 0, None, None, None),
    ],
)
def test_which_way(
    orders: str, spare: int, batch: int | None, heads_of: int | None, page_size: int | None
) -> None:
    of_query, of_keys = Sizes(3, 4, 7), Sizes(3, 2, 30)
    query, key, value, output = orders.split()
    seen = as_sequences(
        tensor(of_query, query),
        tensor(of_keys, key, spare),
        tensor(of_keys, value, spare),
        tensor(of_query, output),
    )
    if batch is None:
        assert seen is None
    else:
        assert seen is not None
        assert (seen.sizes.batch, seen.heads_of, seen.page_size) == (batch, heads_of, page_size)


def test_more_tokens_than_lengths_can_say() -> None:
    query = torch.empty(1, 1, 1, 8)
    key = torch.empty(1, device="meta").as_strided((1 << 20, 1, 1 << 11, 8), (0, 0, 8, 1))
    assert as_sequences(query.expand(1 << 20, -1, -1, -1), key, key, query) is None
