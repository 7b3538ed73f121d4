"""Many queries, which AVX2 takes in tiles of three vectors: in float32, and in all types where it has no integers."""

from __future__ import annotations

import pytest
import torch
from attention_reference import assert_as_exact_as_torch, exact_attention
from cpu_attention import Threads, attend, each_dtype, inputs

from flashmoe_science.cpu import attention
from flashmoe_science.jit.host import InstructionSet
from instruction_sets import each_instruction_set


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("heads", "seqlen_q", "seqlen_k", "head_dim"),
    [
        (8, 128, 200, 64),  # five whole tiles and one vector
        (9, 130, 16, 72),  # one short block
        (3, 600, 79, 128),
        (4, 299, 300, 136),  # longer than one sum
        (11, 97, 65, 8),
    ],
)
def test_many_queries(
    instruction_set: InstructionSet,
    dtype: torch.dtype,
    causal: bool,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
) -> None:
    query, key, value = inputs(1, heads, 1, seqlen_q, seqlen_k, head_dim, dtype)
    out, lse = attention.forward(
        query,
        key,
        value,
        causal=causal,
        softmax_scale=None,
        return_lse=True,
        instruction_set=instruction_set,
    )
    assert_as_exact_as_torch(out, query, key, value, causal)
    exact_lse = exact_attention(query, key, value, causal)[1]
    assert lse is not None
    tolerance = 4e-3 if dtype == torch.bfloat16 else 4e-6
    torch.testing.assert_close(lse.double(), exact_lse, atol=tolerance, rtol=1e-6)


@each_instruction_set
def test_a_query_has_the_same_bits_among_many_and_among_few(instruction_set: InstructionSet) -> None:
    """Without a mask the shape of a tile changes no sum."""
    query, key, value = inputs(1, 2, 2, 1100, 200, 64, torch.float32)
    many = attend(query, key, value, False, None, instruction_set)
    for first in (0, 24, 1020):
        rows = slice(first, first + 80)
        few = attend(query[:, :, rows], key, value, False, None, instruction_set)
        assert torch.equal(few, many[:, :, rows])


@each_instruction_set
@each_dtype
def test_masked_queries_have_the_same_bits_on_more_threads_than_tiles(
    dtype: torch.dtype, instruction_set: InstructionSet
) -> None:
    query, key, value = inputs(1, 1, 1, 1030, 1040, 16, dtype)
    with Threads(1):
        alone = attend(query, key, value, True, None, instruction_set)
    assert_as_exact_as_torch(alone, query, key, value, True)
    with Threads(64):
        assert torch.equal(attend(query, key, value, True, None, instruction_set), alone)


@each_instruction_set
def test_rows_far_apart(instruction_set: InstructionSet) -> None:
    """Keys and values are copied block by block then; what is asked for beyond the last block need not exist."""
    query, key, value = (each.expand(1, 8, -1, -1) for each in inputs(1, 1, 1, 144, 144, 64, torch.float32))
    spread = [torch.cat((each, each), dim=-1)[..., :64] for each in (query, key, value)]
    whole = attend(query, key, value, False, None, instruction_set)
    assert torch.equal(attend(*spread, False, None, instruction_set), whole)
