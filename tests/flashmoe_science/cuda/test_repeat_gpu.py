"""Calls that are compared with the one before them, on a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_attention import reference

from flashmoe_science.cuda.attention import forward
from flashmoe_science.errors import InputError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_calls_that_differ_from_the_last_one() -> None:
    """Each in its turn, after itself and after each other one, gives what it gave alone."""
    q, k, v = (torch.randn(2, 4, 96, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    short = tuple(x[:, :, :40] for x in (q, k, v))
    calls = [
        lambda: forward(q, k, v),
        lambda: forward(q, k, v, causal=True),
        lambda: forward(q, k, v, return_lse=True),
        lambda: forward(q, k, v, softmax_scale=0.3),
        lambda: forward(q, k, v, softmax_scale=0.5),
        lambda: forward(*short),
        lambda: forward(q.half(), k.half(), v.half()),
        lambda: forward(q, q, q),
        lambda: forward(q.contiguous(), short[1], short[2]),
    ]
    first = [call() for call in calls]
    for index, tensors, causal in ((1, (q, k, v), True), (5, short, False)):
        exact, _ = reference(*tensors, causal=causal, scale=0.125, dtype=torch.float64)
        torch.testing.assert_close(first[index][0].double(), exact, atol=2e-2, rtol=2e-2)
    for one in range(len(calls)):
        for other in range(len(calls)):
            for index in (one, one, other, other):
                with torch.inference_mode(one % 2 == 0):
                    out, lse = calls[index]()
                expected_out, expected_lse = first[index]
                assert torch.equal(out, expected_out)
                assert (lse is None) == (expected_lse is None)
                assert lse is None or torch.equal(lse, expected_lse)


def test_a_gradient_is_refused_after_a_call_like_it() -> None:
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for _ in range(3):
        forward(q, k, v)
    v.requires_grad_()
    with pytest.raises(InputError, match="requires a gradient"):
        forward(q, k, v)
    with torch.no_grad():
        for _ in range(3):
            forward(q, k, v)
    with pytest.raises(InputError, match="requires a gradient"):
        forward(q, k, v)
