"""The Hopper kernel of attention backward for short sequences on a GPU.

More heads than multiprocessors, so that a block has several; beside itself, in graphs, and on streams of any priority.
"""

from __future__ import annotations

import pytest
import torch
from attention_backward import Backward, assert_gradients, backward_case

from flashmoe_science.configs.attention.backward_short import ShortBackward
from flashmoe_science.cuda.attention.gradients import backward
from flashmoe_science.cuda.attention.gradients.problem import GradientKind
from flashmoe_science.cuda.attention.gradients.wgmma import why_not_device
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import device_of
from flashmoe_science.gradients import Gradients, Needs

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    reason = why_not_device(device_of(torch.cuda.current_device()))
    if reason is not None:
        pytest.skip(reason)


def case_of(
    lengths: tuple[int, int],
    heads: tuple[int, int],
    head_dim: int = 64,
    *,
    causal: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    rows_first: bool = False,
) -> Backward:
    torch.manual_seed(sum(lengths) + sum(heads) + head_dim)

    def tensor(heads: int, rows: int) -> torch.Tensor:
        shape = (2, rows, heads, head_dim) if rows_first else (2, heads, rows, head_dim)
        made = torch.randn(shape, device="cuda").to(dtype)
        return made.transpose(1, 2) if rows_first else made

    (seqlen_q, seqlen_k), (of_query, of_key) = lengths, heads
    return backward_case(
        *(tensor(of_query, seqlen_q), tensor(of_key, seqlen_k), tensor(of_key, seqlen_k)),
        tensor(of_query, seqlen_q),
        causal=causal,
        grad_lse=torch.randn(2, of_query, seqlen_q, device="cuda"),
    )


def gradients(case: Backward) -> Gradients:
    return backward(
        *(case.grad_output, case.query, case.key, case.value, case.output, case.lse, case.grad_lse),
        causal=case.causal,
        softmax_scale=case.scale,
        needs=Needs(True, True, True),
        choice=Choice(GradientKind.SHORT, ShortBackward(case.causal)),
    )


def assert_same(results: list[Gradients]) -> None:
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths", "heads", "head_dim", "dtype", "rows_first"),
    [
        ((200, 197), (150, 150), 64, torch.bfloat16, False),
        ((64, 64), (300, 300), 64, torch.float16, True),
        ((130, 700), (200, 200), 32, torch.float16, False),
        ((512, 512), (140, 140), 64, torch.bfloat16, True),
        ((100, 300), (400, 100), 40, torch.bfloat16, False),
        ((300, 130), (90, 90), 8, torch.bfloat16, True),
        ((1, 1), (500, 500), 64, torch.bfloat16, False),
    ],
)
def test_more_heads_than_multiprocessors(
    lengths: tuple[int, int],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    rows_first: bool,
    causal: bool,
) -> None:
    case = case_of(lengths, heads, head_dim, causal=causal, dtype=dtype, rows_first=rows_first)
    results = [gradients(case) for _ in range(30)]
    assert_gradients(case, results[0])
    assert_same(results)


def test_beside_itself_on_streams_of_any_priority() -> None:
    case = case_of((256, 256), (150, 150))
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1, -2, 0)]
    results = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(gradients(case))
    torch.cuda.synchronize()
    assert_gradients(case, results[0])
    assert_same(results)


def test_behind_the_kernel_that_makes_what_it_reads() -> None:
    """It may begin before that has ended."""
    case = case_of((128, 128), (200, 200))
    expected = gradients(case)
    results = []
    for _ in range(30):
        output = torch.zeros_like(case.output)
        output.copy_(case.output)
        results.append(
            backward(
                *(case.grad_output, case.query, case.key, case.value, output, case.lse, case.grad_lse),
                causal=case.causal,
                softmax_scale=case.scale,
                needs=Needs(True, True, True),
                choice=Choice(GradientKind.SHORT, ShortBackward(case.causal)),
            )
        )
    assert_same([expected, *results])


def test_in_a_graph() -> None:
    case = case_of((197, 197), (150, 150))
    expected = gradients(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(case)
    for gradient in captured:
        assert gradient is not None
        gradient.fill_(torch.nan)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert_same([expected, captured])
