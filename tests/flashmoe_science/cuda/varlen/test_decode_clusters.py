"""Sets of rows that a cluster's blocks share through their shared memory: the decode kernel's own source on the CPU."""

from __future__ import annotations

import pytest
import torch
from emulated import NEEDS_COMPILER
from emulated_decode import options, run_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from varlen_cases import Shape, bounds, packed, paged
from varlen_reference import assert_as_exact_as_pytorch


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 400)), min_size=0, max_size=8),
    page_size=st.sampled_from([0, 1, 16]),
    cluster=st.sampled_from([2, 8]),
    clusters=st.integers(1, 17),
    heads=st.sampled_from([(4, 2), (2, 1)]),
    window=st.sampled_from([(-1, -1), (3, -1), (130, 5)]),
    sinks=st.booleans(),
    data=st.integers(0, 1000),
)
@NEEDS_COMPILER
def test_any_batch(
    lengths: list[tuple[int, int]],
    page_size: int,
    cluster: int,
    clusters: int,
    heads: tuple[int, int],
    window: tuple[int, int],
    sinks: bool,
    data: int,
) -> None:
    queries, keys = zip(*lengths, strict=True) if lengths else ((), ())
    shape = Shape(queries, keys, *heads, 32, dtype=torch.bfloat16)
    call = paged(shape, page_size, data, garbage=1 << 30) if page_size else packed(shape, data)
    if sinks:
        call["sinks"] = 3 * torch.randn(heads[0], generator=torch.Generator().manual_seed(data))
    chosen = {"window": window}
    out, lse = run_on_cpu(call, options(**chosen), (4, 400), cluster * clusters, cluster=cluster)
    assert_as_exact_as_pytorch(out, lse, call, **{**bounds(shape), "causal": True, **chosen})
