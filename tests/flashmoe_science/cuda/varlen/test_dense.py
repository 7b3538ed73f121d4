"""Dense tensors through the kernel of `attention_varlen`, its source on the CPU; which tile a call takes."""

from __future__ import annotations

import math

import pytest
import torch
from dense_options import check_dense, dense
from emulated import NEEDS_COMPILER
from emulated_varlen import attend_dense

from flashmoe_science.configs.attention.varlen import Features, tiles
from flashmoe_science.cuda.varlen.dense import tile_of
from problems import H200

SINKS = torch.tensor([0.0, 2.0, -math.inf, 5.0])


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("window", "softcap", "scale"), [((9, 0), 0.0, 0.2), ((-1, 5), 0.0, -0.2), ((-1, -1), 3.0, 0.2)]
)
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_as_defined(
    window: tuple[int, int], softcap: float, scale: float, sinks: torch.Tensor | None, one_thread: None
) -> None:
    tensors = dense(2, (4, 2), (40, 70), 32, torch.bfloat16)
    output, lse = attend_dense(*tensors, window=window, softcap=softcap, sinks=sinks, softmax_scale=scale)
    check_dense(
        output, lse, tensors, sinks, causal=False, window=window, softcap=softcap, softmax_scale=scale
    )


def test_few_rows_take_the_short_tile() -> None:
    both = tiles("sm_90", 128, 128, Features(packed_heads=True))
    assert tile_of(both, 4 * 4096, 8, H200) == both.tall
    assert tile_of(both, 4 * 128, 8, H200) == both.short
