"""`flash_attention` with a window, a cap and sinks, on the CPU; what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dense_options import check_dense, dense
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from flashmoe_science import InputError, flash_attention

SINKS = torch.tensor([0.0, 2.0, -math.inf, 5.0])


def attend(*tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    result = flash_attention(*tensors, **options, return_lse=True)
    assert isinstance(result, tuple)
    return result


@settings(max_examples=25, deadline=None)
@given(
    st.tuples(st.integers(0, 40), st.integers(0, 60)),
    st.booleans(),
    st.tuples(st.integers(-1, 30), st.integers(-1, 10)),
    st.sampled_from([0.0, 2.5]),
    st.booleans(),
)
def test_as_defined(
    lengths: tuple[int, int], causal: bool, window: tuple[int, int], softcap: float, with_sinks: bool
) -> None:
    tensors = dense(2, (4, 2), lengths, 32, torch.float32)
    sinks = SINKS if with_sinks else None
    output, lse = attend(*tensors, causal=causal, window=window, softcap=softcap, sinks=sinks)
    assert output.stride() == torch.empty_like(tensors[0]).stride()
    check_dense(output, lse, tensors, sinks, causal=causal, window=window, softcap=softcap)


def test_a_window_that_hides_nothing_is_none() -> None:
    tensors = dense(2, (4, 2), (20, 30), 32, torch.float32)
    plain, lse = attend(*tensors, causal=True)
    for window in ((-1, -1), (1000, 7), (2**63 - 1, 2**63 - 1)):
        wide, wide_lse = attend(*tensors, causal=True, window=window)
        torch.testing.assert_close(wide, plain)
        torch.testing.assert_close(wide_lse, lse)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(scale: float) -> None:
    query, key, value = dense(1, (4, 2), (20, 30), 32, torch.float32)
    output, _ = attend(query, key, value, softmax_scale=scale, window=(8, 8))
    expected, _ = attend(query * scale, key, value, softmax_scale=1.0, window=(8, 8))
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": (-2, 0)}, r"window is \(-2, 0\); expected \(left, right\)"),
        ({"window": 5}, "window is 5; expected"),
        ({"softcap": -1.0}, "softcap is -1.0; expected"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\); expected \(4,\)"),
        ({"sinks": [0.0] * 4}, "sinks is a list; expected a torch.Tensor"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        attend(*dense(1, (4, 2), (3, 4), 32, torch.float32), **options)


def test_what_pytorch_keeps_beside_sinks_is_not_missed() -> None:
    tensors = dense(1, (4, 2), (5, 9), 32, torch.float32)
    expected, _ = attend(*tensors, sinks=-torch.ones(4))
    output, _ = attend(*tensors, sinks=torch._neg_view(torch.ones(4)))
    assert torch.equal(output, expected)
    with forward_ad.dual_level(), pytest.raises(InputError, match="no forward-mode derivative"):
        attend(*tensors, sinks=forward_ad.make_dual(torch.ones(4), torch.ones(4)))
