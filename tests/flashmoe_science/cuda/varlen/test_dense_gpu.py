"""`flash_attention` with a window, a cap and sinks on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from dense_options import check_dense, dense, each_option

from flashmoe_science import flash_attention
from flashmoe_science.errors import CaptureError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@each_option
def test_as_defined(
    dtype: torch.dtype,
    head_dim: int,
    heads: tuple[int, int],
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    with_sinks: bool,
) -> None:
    tensors = dense(2, heads, (150, 333), head_dim, dtype)
    sinks = torch.linspace(-3, 6, heads[0]) if with_sinks else None
    options = {"causal": causal, "window": window, "softcap": softcap}
    query, key, value = (tensor.cuda() for tensor in tensors)
    on_device = None if sinks is None else sinks.cuda()
    for _ in range(2):  # made ready, then recognised
        result = flash_attention(query, key, value, **options, sinks=on_device, return_lse=True)  # type: ignore[arg-type]
        assert isinstance(result, tuple)
        check_dense(result[0].cpu(), result[1].cpu(), tensors, sinks, **options)


@pytest.mark.parametrize("lengths", [(150, 336), (150, 333), (1, 500), (5, 512)], ids=str)
@pytest.mark.parametrize(
    "rows_first",
    [(True, True, True), (False, False, False), (True, False, False), (False, True, True)],
    ids=str,
)
@each_option
def test_layouts(
    rows_first: tuple[bool, bool, bool],
    lengths: tuple[int, int],
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    with_sinks: bool,
) -> None:
    """(batch, heads, seqlen) in memory, and (batch, seqlen, heads): sequences, heads of one, pages, none of these."""
    tensors = dense(3, (8, 2), lengths, 64, torch.bfloat16)
    sinks = torch.linspace(-3, 6, 8) if with_sinks else None
    options = {"causal": causal, "window": window, "softcap": softcap}
    query, key, value = (
        (tensor.transpose(1, 2).contiguous().transpose(1, 2) if first else tensor.contiguous()).cuda()
        for tensor, first in zip(tensors, rows_first, strict=True)
    )
    on_device = None if sinks is None else sinks.cuda()
    result = flash_attention(query, key, value, **options, sinks=on_device, return_lse=True)  # type: ignore[arg-type]
    assert isinstance(result, tuple)
    assert result[0].stride() == torch.empty_like(query).stride()
    check_dense(result[0].cpu(), result[1].cpu(), tensors, sinks, **options)


@pytest.mark.parametrize("queries", [1, 200])
def test_captured(queries: int) -> None:
    query, key, value = (each.cuda() for each in dense(2, (8, 2), (queries, 336), 64, torch.bfloat16))
    sinks = torch.linspace(-3, 6, 8, device="cuda")
    expected = flash_attention(query, key, value, causal=True, window=(50, 0), sinks=sinks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = flash_attention(query, key, value, causal=True, window=(50, 0), sinks=sinks)
    for _ in range(3):
        output.zero_()  # type: ignore[union-attr]
        graph.replay()
        assert torch.equal(output, expected)  # type: ignore[arg-type]


def test_a_graph_outlives_the_thread_that_captured_it() -> None:
    query, key, value = (each.cuda() for each in dense(2, (8, 2), (300, 336), 64, torch.bfloat16))
    graph = torch.cuda.CUDAGraph()

    def captured() -> tuple[torch.Tensor, torch.Tensor]:
        expected = flash_attention(query, key, value, causal=True, window=(50, 0))
        with torch.cuda.graph(graph):
            output = flash_attention(query, key, value, causal=True, window=(50, 0))
        assert isinstance(expected, torch.Tensor)
        assert isinstance(output, torch.Tensor)
        return expected, output

    with ThreadPoolExecutor(1) as pool:
        expected, output = pool.submit(captured).result()
    torch.zeros(
        1 << 20, dtype=torch.int32, device="cuda"
    )  # where what the thread kept was, if that is free now
    output.zero_()
    graph.replay()
    assert torch.equal(output, expected)


def test_a_first_call_under_capture_is_refused() -> None:
    """No other test has these lengths."""
    query, key, value = (each.cuda() for each in dense(2, (8, 2), (37, 592), 64, torch.bfloat16))
    with pytest.raises(CaptureError, match="before capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        flash_attention(query, key, value, causal=True, window=(51, 0))
