"""Gradients with a window or a cap on a GPU, by the kernels that take them."""

from __future__ import annotations

import pytest
import torch
from attention_backward import Backward, assert_gradients, backward_case

from flashmoe_science.configs.attention.backward_hopper import HopperBackward
from flashmoe_science.cuda.attention.gradients import backward, wgmma
from flashmoe_science.cuda.attention.gradients.problem import GradientKind
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import device_of
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
    heads: tuple[int, int] = (4, 2),
) -> Backward:
    torch.manual_seed(sum(lengths) + head_dim)
    (seqlen_q, seqlen_k), (of_query, of_key) = lengths, heads
    query, gradient = (
        torch.randn(2, of_query, seqlen_q, head_dim, device="cuda").to(dtype) for _ in range(2)
    )
    key, value = (torch.randn(2, of_key, seqlen_k, head_dim, device="cuda").to(dtype) for _ in range(2))
    return backward_case(
        *(query, key, value, gradient),
        causal=causal,
        grad_lse=torch.randn(2, of_query, seqlen_q, device="cuda"),
        window=window,
        softcap=softcap,
    )


def gradients_of(
    case: Backward, needs: Needs = ALL, choice: Choice | None = None
) -> tuple[torch.Tensor | None, ...]:
    return backward(
        *(case.grad_output, case.query, case.key, case.value, case.output, case.lse, case.grad_lse),
        causal=case.causal,
        softmax_scale=case.scale,
        needs=needs,
        window=case.window,
        softcap=case.softcap,
        choice=choice,
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


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [(1, 700), (200, 1500), (700, 300), (513, 513)], ids=str)
def test_lengths(lengths: tuple[int, int], head_dim: int, softcap: float) -> None:
    """Rows without keys, and keys without rows, among them."""
    case = case_of(lengths, head_dim, torch.bfloat16, (50, -1), True, softcap)
    assert_gradients(case, gradients_of(case))


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_same_bits_in_every_call(head_dim: int, softcap: float) -> None:
    case = case_of((600, 600), head_dim, torch.bfloat16, (90, -1), True, softcap)
    first = gradients_of(case)
    for _ in range(50):
        again = gradients_of(case)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [0, 63, 500])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_tiles_than_multiprocessors(head_dim: int, window: int) -> None:
    """Blocks draw tickets, and wait for each other: two calls have the same bits."""
    case = case_of((1300, 1500), head_dim, torch.bfloat16, (window, -1), True, 0.0, heads=(24, 12))
    first, second = (gradients_of(case) for _ in range(2))
    assert_gradients(case, first)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_kernel_of_its_own_converts(head_dim: int) -> None:
    """As it is with a tuned configuration."""
    device = device_of(torch.cuda.current_device())
    if wgmma.why_not_device(device) is not None:
        pytest.skip("this GPU has no wgmma")
    case = case_of((600, 700), head_dim, torch.bfloat16, (90, -1), True, 0.0)
    tile = HopperBackward(head_dim, True, window=True)
    assert_gradients(case, gradients_of(case, choice=Choice(GradientKind.HOPPER, tile)))


@pytest.mark.parametrize(
    "needs", [Needs(True, False, False), Needs(False, True, False), Needs(False, False, True)]
)
def test_only_what_is_needed(needs: Needs) -> None:
    case = case_of((300, 300), 64, torch.bfloat16, (90, -1), True, 0.0)
    gradients = gradients_of(case, needs)
    assert [gradient is not None for gradient in gradients] == list(needs)
    assert_gradients(case, gradients)
