"""The Hopper kernel of attention backward for short sequences without a GPU: whole calls on the CPU, and what it takes.

Fences and waits for products do nothing here: that none is lacking is for tests on a GPU to show.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_backward import Backward, assert_gradients, backward_case
from emulated import NEEDS_COMPILER
from emulated_hopper_backward import emulate

from flashmoe_science.configs.attention.backward_hopper import HopperBackward
from flashmoe_science.configs.attention.backward_short import ShortBackward, all_configurations
from flashmoe_science.cuda.attention.gradients import explain, short
from flashmoe_science.cuda.attention.gradients.backward import _problem
from flashmoe_science.cuda.attention.gradients.problem import BackwardProblem, GradientKind
from flashmoe_science.cuda.attention.gradients.select import select
from flashmoe_science.cuda.attention.problem import strides_of
from flashmoe_science.errors import InputError
from flashmoe_science.gradients import Needs
from flashmoe_science.jit.limits import check_block
from problems import H200

ALL = Needs(True, True, True)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "heads", "lengths", "blocks"),
    [
        (64, (1, 1), (1, 1), 1),
        (64, (3, 3), (64, 128), 1),
        (64, (5, 5), (70, 140), 2),
        (48, (4, 2), (200, 77), 1),
        (64, (4, 2), (200, 300), 1),
        (8, (2, 2), (300, 200), 2),
        (64, (1, 1), (512, 512), 1),
        (56, (8, 1), (33, 260), 1),
        (64, (7, 7), (65, 1), 2),
        (32, (3, 3), (130, 700), 2),
    ],
)
@pytest.mark.usefixtures("emulated")
def test_gradients(
    head_dim: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    blocks: int,
    causal: bool,
    dtype: torch.dtype,
) -> None:
    (of_query, of_key), (seqlen_q, seqlen_k) = heads, lengths
    torch.manual_seed(0)
    query, grad_output = (torch.randn(2, of_query, seqlen_q, head_dim).to(dtype) for _ in range(2))
    key, value = (torch.randn(2, of_key, seqlen_k, head_dim).to(dtype) for _ in range(2))
    case = backward_case(
        query, key, value, grad_output, causal=causal, grad_lse=torch.randn(2, of_query, seqlen_q)
    )
    assert case.grad_lse is not None
    problem = _problem(
        (query, key, value, case.output), strides_of("grad_output", grad_output), causal, None, ALL
    )
    planned = short.plan(problem, ShortBackward(causal), dataclasses.replace(H200, multiprocessors=blocks))
    assert planned.workspace_bytes == 0
    gradients = tuple(torch.full_like(tensor, torch.nan) for tensor in (query, key, value))
    given = (query, key, value, case.output, grad_output, case.lse, case.grad_lse, *gradients)
    planned.launch(*(tensor.data_ptr() for tensor in given), 0)
    assert_gradients(case, gradients)


def launched(case: Backward, *, causal: bool = False) -> tuple[torch.Tensor, ...]:
    """The gradients of a call without one of the log-sum-exp, by one block."""
    tensors = case.query, case.key, case.value, case.output
    problem = _problem(tensors, strides_of("grad_output", case.grad_output), causal, None, ALL)
    planned = short.plan(problem, ShortBackward(causal), dataclasses.replace(H200, multiprocessors=1))
    gradients = tuple(torch.full_like(tensor, 7.0) for tensor in tensors[:3])
    addresses = (tensor.data_ptr() for tensor in (*tensors, case.grad_output, case.lse))
    planned.launch(*addresses, 0, *(gradient.data_ptr() for gradient in gradients), 0)
    return gradients


@NEEDS_COMPILER
@pytest.mark.parametrize("which", ["query", "value"])
@pytest.mark.usefixtures("emulated")
def test_nan_spreads_as_far_as_it_must(which: str) -> None:
    """One row of a query, or one entry of a value."""
    torch.manual_seed(0)
    query, key, value, grad_output = (torch.randn(1, 2, 200, 64).bfloat16() for _ in range(4))
    if which == "query":
        query[0, 0, 17] = torch.nan
    else:
        value[0, 0, 90, 5] = torch.nan
    of_query, of_key, of_value = (
        gradient.isnan() for gradient in launched(backward_case(query, key, value, grad_output, causal=False))
    )
    assert not any(spread[0, 1].any() for spread in (of_query, of_key, of_value))
    assert of_key[0, 0].all()
    if which == "query":
        assert of_query[0, 0, 17].all()
        assert not of_query[0, 0, :17].any()
        assert not of_query[0, 0, 18:].any()
        assert of_value[0, 0].all()
    else:
        assert of_query[0, 0].all()
        assert not of_value[0, 0].any()


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated")
def test_an_infinite_score_gives_nan_and_an_infinite_sink_zeros() -> None:
    """Either way the log-sum-exp is infinite. With a sink the output is zero, and the scores are finite."""
    torch.manual_seed(0)
    query, key, value, grad_output = (torch.randn(1, 1, 100, 64).bfloat16() for _ in range(4))
    query[0, 0, 3, 0] = torch.inf
    case = backward_case(query, key, value, grad_output, causal=False)
    case = dataclasses.replace(case, lse=case.lse.index_fill(2, torch.tensor(3), torch.inf))
    of_query, of_key, _ = launched(case)
    assert of_query[0, 0, 3].isnan().all()
    assert not of_query[0, 0, :3].isnan().any()
    assert of_key.isnan().all()
    query = query.nan_to_num(posinf=1.0)
    case = dataclasses.replace(
        backward_case(query, key, value, grad_output, causal=False),
        output=torch.zeros_like(query),
        lse=torch.full((1, 1, 100), torch.inf),
    )
    assert all((gradient == 0).all() for gradient in launched(case))


def test_an_empty_batch_has_a_kernel() -> None:
    query = torch.empty(0, 16, 197, 64, dtype=torch.bfloat16, device="meta")
    assert explain(query, query, query, device=H200).kernel is GradientKind.PORTABLE


def problem_of(
    shape: tuple[int, int, int, int] = (8, 16, 197, 64),
    kv_heads: int = 16,
    keys: int = 197,
    *,
    causal: bool = False,
    needs: Needs = ALL,
    output: torch.Tensor | None = None,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
) -> BackwardProblem:
    batch, _, _, head_dim = shape
    query = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    key = torch.empty(batch, kv_heads, keys, head_dim, dtype=torch.bfloat16, device="meta")
    like = query if output is None else output
    strides = strides_of("grad_output", query)
    return _problem((query, key, key, like), strides, causal, scale, needs, window=window)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (problem_of((8, 16, 197, 72)), "it takes at most 64"),
        (problem_of(needs=Needs(False, True, True)), "not all are needed"),
        (problem_of(window=(64, -1), causal=True), "no window and no cap"),
        (problem_of((8, 16, 513, 64)), "1 query heads with 513 rows share keys"),
        (problem_of((8, 16, 65, 64), kv_heads=2), "8 query heads with 65 rows share keys"),
        (
            problem_of(
                output=torch.empty(1, 16, 197, 64, dtype=torch.bfloat16, device="meta").expand(8, -1, -1, -1)
            ),
            "expanded dimension",
        ),
        (problem_of(scale=0.0), "needs a positive one"),
        (problem_of(keys=0), "no keys"),
    ],
)
def test_it_says_why_it_does_not_take_a_call(problem: BackwardProblem, reason: str) -> None:
    refusal = short.why_not(problem, H200)
    assert refusal is not None
    assert reason in refusal
    assert short.choose(problem, H200) is None
    with pytest.raises(InputError, match="choose a"):
        short.check(problem, ShortBackward(problem.causal))


def test_it_takes_a_configuration_of_its_own_and_for_the_same_mask() -> None:
    with pytest.raises(InputError, match="takes a ShortBackward"):
        short.check(problem_of(), HopperBackward(64, False))
    with pytest.raises(InputError, match="choose again"):
        short.check(problem_of(causal=True), ShortBackward(False))


@pytest.mark.parametrize(
    ("heads", "keys", "kind"),
    [
        (8, 64, GradientKind.SHORT),
        (8, 128, GradientKind.SHORT),
        (8, 129, GradientKind.HOPPER),
        (132, 256, GradientKind.SHORT),
        (148, 256, GradientKind.HOPPER),
        (200, 256, GradientKind.SHORT),
        (200, 257, GradientKind.HOPPER),
        (264, 512, GradientKind.SHORT),
        (264, 513, GradientKind.HOPPER),
    ],
)
def test_it_is_taken_where_heads_fill_the_gpu(heads: int, keys: int, kind: GradientKind) -> None:
    """Either could: with the other, blocks share a head's keys out."""
    problem = problem_of((1, heads, 64, 64), heads, keys)
    assert short.choose(problem, H200) is not None
    assert select(problem, H200).kernel is kind


def test_its_tile_fits() -> None:
    for tile in all_configurations():
        check_block(repr(tile), "sm_90", tile.threads, tile.shared_bytes)
    assert short.kernels("sm_80") == []
