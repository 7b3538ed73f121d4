"""The routing kernel without a GPU: its shapes, and its source run on the CPU."""

from __future__ import annotations

import ctypes

import pytest
import torch
from emulated import NEEDS_COMPILER, compile_emulation
from topk_reference import reference

from flashmoe_science.configs.moe import topk as configs
from flashmoe_science.cuda.moe import topk
from flashmoe_science.jit.limits import LIMITS
from flashmoe_science.moe_arguments import Scores

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("experts", [1, 8, 9, 32, 33, 100, 128, 129, 256, 257, 512, 513, 1024])
def test_the_smallest_shape_that_holds_the_experts(experts: int) -> None:
    configuration = configs.configuration(experts)
    assert configuration.experts >= experts
    assert all(
        other.experts < experts or other.experts >= configuration.experts for other in configs.CONFIGURATIONS
    )
    assert configuration.tokens_per_block * configuration.lanes == configuration.threads


@pytest.mark.parametrize("architecture", LIMITS)
def test_bfloat16_is_built_where_there_is_any(architecture: str) -> None:
    built = topk.kernels(architecture)
    assert len({kernel.label for kernel in built}) == len(built)
    assert any(kernel.macros["ELEMENT_BF16"] for kernel in built) == LIMITS[architecture].bfloat16


def emulate(
    logits: torch.Tensor,
    k: int,
    scores: Scores = Scores.SOFTMAX,
    *,
    renormalize: bool = True,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    shape = configs.configuration(experts)
    library = compile_emulation(topk.kernel(shape, logits.dtype, "sm_90"), "TopkParameters")
    weights = torch.full((tokens + 1, k), torch.nan)
    ids = torch.full((tokens + 1, k), -7, dtype=torch.int32)
    arguments = ctypes.create_string_buffer(topk.ARGUMENT_BYTES)
    topk.write_arguments(
        arguments, tokens, experts, k, scores, renormalize, scale, groups=groups, top_groups=top_groups
    )
    addresses = (ctypes.c_uint64 * 4).from_buffer(arguments)
    bias_address = 0 if bias is None else bias.data_ptr()
    addresses[:] = [logits.data_ptr(), bias_address, weights.data_ptr(), ids.data_ptr()]
    library.run(arguments, -(-tokens // shape.tokens_per_block))
    assert (ids[-1] == -7).all()
    assert weights[-1].isnan().all()
    return weights[:-1], ids[:-1]


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "dtype", "scores", "renormalize", "biased", "scale"),
    [
        (37, 8, 2, BF16, Scores.SOFTMAX, True, False, 1.0),
        (5, 7, 7, FP32, Scores.SIGMOID, False, True, 1.0),
        (6, 100, 8, FP16, Scores.SOFTMAX, False, False, 2.5),
        (5, 256, 8, FP32, Scores.SIGMOID, True, True, 2.5),
        (3, 64, 50, FP32, Scores.SOFTMAX, True, True, 0.5),
        (2, 1024, 33, BF16, Scores.SIGMOID, True, False, 1.0),
    ],
)
def test_emulated(
    tokens: int,
    experts: int,
    k: int,
    dtype: torch.dtype,
    scores: Scores,
    renormalize: bool,
    biased: bool,
    scale: float,
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(tokens, experts).to(dtype)
    bias = torch.randn(experts) if biased else None
    options = {"renormalize": renormalize, "bias": bias, "scale": scale}
    weights, ids = emulate(logits, k, scores, **options)
    exact_weights, exact_ids = reference(logits, k, scores, **options)
    torch.testing.assert_close(ids.long(), exact_ids)
    torch.testing.assert_close(weights.double(), exact_weights, rtol=2e-6, atol=1e-30)


@NEEDS_COMPILER
def test_emulated_ties_infinities_and_nan() -> None:
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, 3.0, 0.0],
            [0.0, -0.0, 0.0, -0.0, 0.0],
            [nan, 2.0, nan, 1.0, 3.0],
            [nan, -inf, nan, -inf, nan],
            [-inf, -inf, -inf, -inf, -inf],
            [nan, nan, nan, nan, nan],
            [5.0, inf, 1.0, -inf, 2.0],
            [100.0, -100.0, -200.0, 0.0, -inf],
        ]
    )
    weights, ids = emulate(logits, 4)
    exact_weights, exact_ids = reference(logits, 4, Scores.SOFTMAX, True, None, 1.0)
    assert ids.tolist() == exact_ids.tolist()
    assert ids[2].tolist() == [4, 1, 3, 0]
    assert ids[3].tolist() == [1, 3, 0, 2]
    torch.testing.assert_close(weights.double(), exact_weights, rtol=1e-6, atol=1e-37, equal_nan=True)


@NEEDS_COMPILER
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("experts", "groups", "top_groups", "k"),
    [(256, 8, 4, 8), (8, 4, 2, 3), (32, 32, 5, 5), (60, 6, 2, 6), (8, 2, 1, 4)],
)
def test_groups(experts: int, groups: int, top_groups: int, k: int, biased: bool) -> None:
    torch.manual_seed(experts)
    logits = torch.randn(9, experts)
    bias = torch.randn(experts) / 4 if biased else None
    options = {"groups": groups, "top_groups": top_groups}
    weights, ids = emulate(logits, k, Scores.SIGMOID, bias=bias, scale=2.5, **options)
    right, chosen = reference(logits, k, Scores.SIGMOID, True, bias, 2.5, **options)
    torch.testing.assert_close(weights.double(), right, rtol=1e-5, atol=1e-7)
    assert torch.equal(ids.long(), chosen)
