"""Dense tensors through the kernel of `attention_varlen`, its source on the CPU; which tile a call takes."""

from __future__ import annotations

import math

import pytest
import torch
from dense_options import check_dense, dense
from emulated import NEEDS_COMPILER
from emulated_varlen import attend_dense

from flashmoe_science.configs.attention.varlen import Features, tiles
from flashmoe_science.cuda.varlen.portable import tile_of
from flashmoe_science.cuda.varlen.select import VarlenKernel, select
from flashmoe_science.varlen.sequences import as_sequences
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


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("lengths", "kernel"), [((150, 333), VarlenKernel.HOPPER), ((1, 333), VarlenKernel.DECODE)]
)
@pytest.mark.parametrize("rows_first", [True, False])
def test_an_h200_takes_its_own_kernels(
    rows_first: bool, lengths: tuple[int, int], kernel: VarlenKernel, head_dim: int
) -> None:
    if kernel is VarlenKernel.DECODE and head_dim == 256:
        pytest.skip("heads are too wide for decode's tiles of four")
    query, key, value = (
        tensor.transpose(1, 2).contiguous().transpose(1, 2) if rows_first else tensor.contiguous()
        for tensor in dense(2, (4, 2), lengths, head_dim, torch.bfloat16)
    )
    seen = as_sequences(query, key, value, torch.empty_like(query))
    assert seen is not None
    problem = seen.problem(
        torch.bfloat16, window=(100, 0), softcap=20.0, softmax_scale=0.1, sinks=True, return_lse=True
    )
    tokens = seen.sizes.batch * seen.sizes.max_seqlen_q
    assert select(problem, H200, seen.sizes, tokens) is kernel
