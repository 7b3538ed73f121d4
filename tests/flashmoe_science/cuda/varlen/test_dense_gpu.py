"""`flash_attention` with a window, a cap and sinks on a GPU."""

from __future__ import annotations

import pytest
import torch
from dense_options import check_dense, dense, each_option

from flashmoe_science import flash_attention

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
