"""Gradients with a window or a cap on a GPU, by the kernels that take them."""

from __future__ import annotations

import pytest
import torch
from attention_backward import Backward, assert_gradients, backward_case

from flashmoe_science.cuda.attention.gradients import backward
from flashmoe_science.gradients import Needs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ALL = Needs(True, True, True)
WINDOWS = [((100, -1), True), ((30, 7), False), ((-1, 40), False), ((64, -1), False), ((0, -1), True)]


def case_of(
    lengths: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    window: tuple[int, int],
    causal: bool,
    softcap: float,
) -> Backward:
    torch.manual_seed(sum(lengths) + head_dim)
    (seqlen_q, seqlen_k) = lengths
    query, gradient = (torch.randn(2, 4, seqlen_q, head_dim, device="cuda").to(dtype) for _ in range(2))
    key, value = (torch.randn(2, 2, seqlen_k, head_dim, device="cuda").to(dtype) for _ in range(2))
    return backward_case(
        *(query, key, value, gradient),
        causal=causal,
        grad_lse=torch.randn(2, 4, seqlen_q, device="cuda"),
        window=window,
        softcap=softcap,
    )


def gradients_of(case: Backward, needs: Needs = ALL) -> tuple[torch.Tensor | None, ...]:
    return backward(
        *(case.grad_output, case.query, case.key, case.value, case.output, case.lse, case.grad_lse),
        causal=case.causal,
        softmax_scale=case.scale,
        needs=needs,
        window=case.window,
        softcap=case.softcap,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize(("window", "causal"), WINDOWS)
def test_as_defined(
    window: tuple[int, int], causal: bool, softcap: float, head_dim: int, dtype: torch.dtype
) -> None:
    case = case_of((300, 417), head_dim, dtype, window, causal, softcap)
    assert_gradients(case, gradients_of(case))


@pytest.mark.parametrize("lengths", [(1, 700), (700, 300), (513, 513)], ids=str)
def test_lengths(lengths: tuple[int, int]) -> None:
    """Rows without keys, and keys without rows, among them."""
    case = case_of(lengths, 128, torch.bfloat16, (50, -1), True, 3.0)
    assert_gradients(case, gradients_of(case))


def test_the_same_bits_in_every_call() -> None:
    case = case_of((600, 600), 128, torch.bfloat16, (90, -1), True, 3.0)
    first = gradients_of(case)
    for _ in range(50):
        again = gradients_of(case)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "needs", [Needs(True, False, False), Needs(False, True, False), Needs(False, False, True)]
)
def test_only_what_is_needed(needs: Needs) -> None:
    case = case_of((300, 300), 64, torch.bfloat16, (90, -1), True, 0.0)
    gradients = gradients_of(case, needs)
    assert [gradient is not None for gradient in gradients] == list(needs)
    assert_gradients(case, gradients)
