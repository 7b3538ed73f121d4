"""Few rows against many keys: the keys are split over threads."""

from __future__ import annotations

import math

import pytest
import torch
from attention_reference import assert_as_exact_as_torch, exact_attention
from cpu_attention import DTYPES, attend, each_dtype, inputs, normal

from flashmoe_science.cpu import attention
from flashmoe_science.jit.host import InstructionSet
from instruction_sets import each_instruction_set

SHAPES = [
    (1, 1, 1, 1, 4000, 64),
    (1, 8, 2, 1, 2050, 128),
    (2, 4, 4, 3, 1500, 40),
    (1, 2, 2, 50, 1111, 72),
    (1, 1, 1, 64, 1100, 64),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


@each_instruction_set
@each_dtype
@each_shape
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_as_exact_as_pytorch_and_the_same_bits_on_any_number_of_threads(
    instruction_set: InstructionSet, dtype: torch.dtype, shape: tuple[int, ...], causal: bool
) -> None:
    query, key, value = inputs(*shape, dtype)  # type: ignore[arg-type]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            results.append(
                attention.forward(
                    query,
                    key,
                    value,
                    causal=causal,
                    softmax_scale=None,
                    return_lse=True,
                    instruction_set=instruction_set,
                )
            )
    finally:
        torch.set_num_threads(threads)
    out, lse = results[0]
    assert lse is not None
    for other, other_lse in results[1:]:
        assert other_lse is not None
        assert torch.equal(other, out)
        assert torch.equal(other_lse, lse)
    assert_as_exact_as_torch(out, query, key, value, causal)
    tolerance = 4e-3 if dtype == torch.bfloat16 else 4e-6
    exact_lse = exact_attention(query, key, value, causal)[1]
    torch.testing.assert_close(lse.double(), exact_lse, atol=tolerance, rtol=1e-6)


@each_instruction_set
@pytest.mark.parametrize("rows", [1, 20])
def test_a_part_that_outweighs_all_others(instruction_set: InstructionSet, rows: int) -> None:
    """The largest score is in the first, a middle or the last part: the others' weights underflow."""
    for at in (3, 1700, 2999):
        query, key, value = inputs(1, 1, 1, rows, 3000, 64, torch.float32)
        key[0, 0, at] = query[0, 0].mean(dim=0) * 400 + query[0, 0].sign().sum(dim=0).sign() * 400
        assert_as_exact_as_torch(
            attend(query, key, value, False, None, instruction_set), query, key, value, False
        )


@each_instruction_set
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 20])
def test_special_values_in_one_part(instruction_set: InstructionSet, dtype: torch.dtype, rows: int) -> None:
    query, key, value = inputs(1, 1, 1, rows, 2000, 64, dtype)
    key[0, 0, 1500] = math.nan
    assert attend(query, key, value, False, None, instruction_set).isnan().all()
    # Scores of minus infinity in one part only: its weights are zero.
    query = normal(1, 1, rows, 64, dtype=dtype, seed=5).abs() + 0.5
    key = normal(1, 1, 2000, 64, dtype=dtype, seed=6)
    key[0, 0, :1100] = -math.inf
    out = attend(query, key, value, False, None, instruction_set)
    assert_as_exact_as_torch(out, query, key[:, :, 1100:], value[:, :, 1100:], False)
    # In all parts: there is no weight to divide by.
    key[:] = -math.inf
    assert attend(query, key, value, False, None, instruction_set).isnan().all()
