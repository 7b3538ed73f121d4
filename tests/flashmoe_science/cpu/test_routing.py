"""Routing on the CPU, its losses and their gradient: each instruction set against float64 and the composition."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_attention import GuardedMemory, each_dtype, each_instruction_set
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_cases import CASES, exact, incoming, logits_of
from sanitizers import output_under_sanitizers
from topk_reference import reference

from flashmoe_science import MoE, fused_moe, topk_routing, topk_routing_with_losses
from flashmoe_science.cpu import routing
from flashmoe_science.cpu.library import SOURCES
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.moe_arguments import Scores
from flashmoe_science.router_losses import routing_losses
from flashmoe_science.routing_composition import topk as composed_topk
from flashmoe_science.routing_gradients import logits_gradient
from flashmoe_science.routing_options import RoutingOptions

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HARD = Path(__file__).resolve().parents[2] / "hard"


@each_instruction_set
@settings(max_examples=40)
@given(
    tokens=st.integers(0, 12),
    experts=st.integers(1, 20),
    data=st.data(),
    scores=st.sampled_from(Scores),
    renormalize=st.booleans(),
    biased=st.booleans(),
)
def test_routing_is_the_formula(
    instruction_set: InstructionSet,
    tokens: int,
    experts: int,
    data: st.DataObject,
    scores: Scores,
    renormalize: bool,
    biased: bool,
) -> None:
    k = data.draw(st.integers(1, experts))
    dtype = data.draw(st.sampled_from(DTYPES))
    seed = data.draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    # Few different values, so that there are ties.
    logits = torch.randint(-3, 4, (tokens, experts), generator=generator).to(dtype)
    bias = torch.randint(-2, 3, (experts,), generator=generator).float() if biased else None
    weights, ids = routing.topk(
        logits,
        k,
        scores=scores,
        renormalize=renormalize,
        correction_bias=bias,
        scaling_factor=2.5,
        instruction_set=instruction_set,
    )
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert weights.shape == ids.shape == (tokens, k)
    assert weights.is_contiguous()
    assert ids.is_contiguous()
    exact = logits.double()
    score = exact.softmax(-1) if scores is Scores.SOFTMAX else exact.sigmoid()
    rank = logits.float() if bias is None else score.float() + bias
    for token in range(tokens):
        order = sorted(range(experts), key=lambda expert: (-float(rank[token, expert]), expert))[:k]
        assert ids[token].tolist() == order
        expected = score[token, order]
        if renormalize:
            expected = expected / expected.sum()
        torch.testing.assert_close(weights[token].double(), 2.5 * expected, rtol=1e-5, atol=1e-7)


@each_instruction_set
@settings(max_examples=30)
@given(
    groups=st.integers(1, 6),
    size=st.integers(1, 5),
    data=st.data(),
    scores=st.sampled_from(Scores),
    biased=st.booleans(),
)
def test_experts_are_chosen_from_the_best_groups(
    instruction_set: InstructionSet, groups: int, size: int, data: st.DataObject, scores: Scores, biased: bool
) -> None:
    top_groups = data.draw(st.integers(1, groups))
    k = data.draw(st.integers(1, top_groups * size))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    logits = torch.randn(7, groups * size, generator=generator)
    bias = torch.randn(groups * size, generator=generator) / 4 if biased else None
    options = {"groups": groups, "top_groups": top_groups}
    weights, ids = routing.topk(
        logits, k, scores=scores, correction_bias=bias, **options, instruction_set=instruction_set
    )
    right, chosen = reference(logits.double().float(), k, scores, True, bias, 1.0, **options)
    assert torch.equal(ids.long(), chosen)
    torch.testing.assert_close(weights.double(), right, rtol=1e-5, atol=1e-7)


def test_nan_logits_rank_last_and_ids_stay_experts() -> None:
    logits = torch.tensor([[float("nan"), -float("inf"), 1.0, float("nan")], [0.0, 0.0, 0.0, 0.0]])
    weights, ids = routing.topk(logits, 4)
    assert ids.tolist() == [[2, 1, 0, 3], [0, 1, 2, 3]]
    assert weights[0].isnan().all()
    assert weights[1].tolist() == [0.25] * 4


def test_sigmoids_that_are_all_zero_give_weights_of_zero() -> None:
    weights, _ = routing.topk(torch.full((2, 3), -200.0), 2, scores=Scores.SIGMOID)
    assert weights.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@each_instruction_set
@each_dtype
@pytest.mark.parametrize(
    "logits",
    [
        [[1.0, 2.0, float("inf"), 0.0]],
        [[-float("inf")] * 4],
        [[-float("inf"), 2.0, 1.0, -float("inf")]],
        [[float("nan")] * 4],
        [[-0.0, 0.0, -0.0, 0.0]],
        [[6e4, -6e4, 6e4, 0.0]],
    ],
)
@pytest.mark.parametrize("scores", Scores)
def test_infinite_and_equal_logits_are_the_compositions(
    scores: Scores, logits: list[list[float]], dtype: torch.dtype, instruction_set: InstructionSet
) -> None:
    """Choice, weights, losses and counts."""
    given_logits = torch.tensor(logits).to(dtype)
    options = RoutingOptions(scores)
    result = routing.forward(given_logits, 3, options, None, instruction_set=instruction_set)
    weights, ids = composed_topk(given_logits, 3, scores=scores)
    losses = routing_losses(given_logits, ids)
    assert torch.equal(result.ids, ids)
    torch.testing.assert_close(result.weights, weights, equal_nan=True)
    torch.testing.assert_close(result.balance, losses.load_balancing, equal_nan=True)
    torch.testing.assert_close(result.z, losses.z, equal_nan=True)
    assert torch.equal(result.counts, losses.tokens_per_expert)


@each_instruction_set
@pytest.mark.parametrize("name", CASES)
def test_the_pass_gives_the_choice_and_both_losses(name: str, instruction_set: InstructionSet) -> None:
    tokens, experts, k, dtype, options = CASES[name]
    logits = logits_of(tokens, experts, dtype)
    result = routing.forward(logits, k, options, None, instruction_set=instruction_set)
    weights, ids, balance, z, counts = exact(logits.double(), k, options)
    assert torch.equal(result.ids.long(), ids)
    assert torch.equal(result.counts, counts)
    torch.testing.assert_close(result.weights.double(), weights, rtol=2e-6, atol=1e-30)
    torch.testing.assert_close(result.balance.double(), balance, rtol=1e-6, atol=0)
    torch.testing.assert_close(result.z.double(), z, rtol=1e-6, atol=0)


@each_instruction_set
@pytest.mark.parametrize(
    "which", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("name", CASES)
def test_the_gradient(name: str, which: tuple[bool, bool, bool], instruction_set: InstructionSet) -> None:
    """Of weights and losses, and of each alone."""
    tokens, experts, k, dtype, options = CASES[name]
    logits = logits_of(tokens, experts, dtype)
    grads, right, least = incoming(logits, k, options, which)
    _, ids, _, _, counts = exact(logits.double(), k, options)
    gradient = routing.backward(logits, ids.int(), counts, *grads, options, instruction_set=instruction_set)
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(gradient.double(), right, rtol=rounding, atol=least)


@each_dtype
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    logits = logits_of(700, 60, dtype)
    options = RoutingOptions()
    grads = torch.randn(700, 4), torch.ones(()), torch.ones(())
    seen = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            result = routing.forward(logits, 4, options, None)
            gradient = routing.backward(logits, result.ids, result.counts, *grads, options)
            seen.append((*result, gradient))
    finally:
        torch.set_num_threads(threads)
    for other in seen[1:]:
        assert all(map(torch.equal, seen[0], other))


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("experts", [1, 7, 16, 37, 272])
def test_nothing_beside_the_tensors_is_touched(
    experts: int, at_end: bool, dtype: torch.dtype, instruction_set: InstructionSet
) -> None:
    """They begin or end at pages that cannot be read or written."""
    tokens, k = 3, min(experts, 5)
    memories = [
        GuardedMemory(each, at_end) for each in (logits_of(tokens, experts, dtype), torch.zeros(experts))
    ]
    logits, bias = (each.tensor for each in memories)
    weights, ids = routing.topk(logits, k, correction_bias=bias, instruction_set=instruction_set)
    options = RoutingOptions()
    result = routing.forward(logits, k, options, bias, instruction_set=instruction_set)
    assert torch.equal(result.weights, weights)
    assert torch.equal(result.ids, ids)
    others = [GuardedMemory(each, at_end) for each in (ids, result.counts, torch.ones(tokens, k))]
    gradient = routing.backward(
        logits,
        *(each.tensor for each in others),
        torch.ones(()),
        None,
        options,
        instruction_set=instruction_set,
    )
    assert gradient.isfinite().all()


ROUTINGS: list[dict[str, Any]] = [
    {},
    {"renormalize": False, "scaling_factor": 2.5},
    {"scores": "sigmoid", "groups": 8, "top_groups": 4},
]


@pytest.mark.parametrize("options", ROUTINGS)
def test_autograd_through_the_kernels_is_that_of_the_composition(options: dict[str, Any]) -> None:
    logits = logits_of(33, 64, torch.float32).requires_grad_()
    weights, ids, losses = topk_routing_with_losses(logits, 4, **options)
    routed, chosen = topk_routing(logits, 4, **options)
    right, expected = composed_topk(
        logits, 4, **{**options, "scores": Scores(options.get("scores", "softmax"))}
    )
    composed = routing_losses(logits, expected)
    assert torch.equal(ids, expected)
    assert torch.equal(chosen, expected)
    assert torch.equal(losses.tokens_per_expert, composed.tokens_per_expert)
    assert not losses.tokens_per_expert.requires_grad
    factors = torch.randn(33, 4, generator=torch.Generator().manual_seed(3))
    gradients = [
        torch.autograd.grad((w * factors).sum() + 0.3 * its.load_balancing + 0.2 * its.z, logits)[0]
        for w, its in ((weights, losses), (right, composed))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=2e-7)
    alone = [
        torch.autograd.grad((w * factors).sum(), logits)[0]
        for w in (routed, composed_weights(logits, options))
    ]
    torch.testing.assert_close(*alone, rtol=1e-5, atol=2e-7)


def composed_weights(logits: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    kind = Scores(options.get("scores", "softmax"))
    return composed_topk(logits, 4, **{**options, "scores": kind})[0]


def test_the_gradients_own_gradient_is_that_of_the_composition() -> None:
    """Routing is differentiable any number of times."""
    logits = logits_of(9, 64, torch.float32).requires_grad_()
    seconds = []
    for weights, its in (
        topk_routing_with_losses(logits, 4)[::2],
        (composed_weights(logits, {}), routing_losses(logits, topk_routing(logits.detach(), 4)[1])),
    ):
        value = weights.square().sum() + its.load_balancing + its.z
        (first,) = torch.autograd.grad(value, logits, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), logits)[0])
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-6)


def test_gradients_with_other_strides_are_taken() -> None:
    """As of sums, which are expanded, and of a part of the weights."""
    logits = logits_of(9, 64, torch.float32).requires_grad_()
    weights, ids = topk_routing(logits, 4, renormalize=False)
    right = torch.zeros_like(logits)
    for of in (weights.sum(), weights[:, ::2].square().sum()):
        (grad,) = torch.autograd.grad(of, weights, retain_graph=True)
        right = logits_gradient(
            *(grad, logits, ids), scores=Scores.SOFTMAX, renormalize=False, scaling_factor=1.0
        )
        (gradient,) = torch.autograd.grad(of, logits, retain_graph=True)
        torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-8)


def test_the_module_trains_by_its_losses() -> None:
    torch.manual_seed(0)
    layer = MoE(64, 32, 8, 2)
    tokens = torch.randn(20, 64)
    output, losses = layer.forward_with_losses(tokens)
    (losses.load_balancing + losses.z).backward()
    logits = torch.nn.functional.linear(tokens, layer.gate.weight.detach()).requires_grad_()  # type: ignore[arg-type]
    composed = routing_losses(logits, composed_topk(logits.detach(), 2)[1])
    (composed.load_balancing + composed.z).backward()
    assert logits.grad is not None
    torch.testing.assert_close(losses.load_balancing, composed.load_balancing)
    torch.testing.assert_close(layer.gate.weight.grad, logits.grad.t() @ tokens, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(output, layer(tokens))


def test_chosen_experts_go_on_to_the_experts() -> None:
    torch.manual_seed(0)
    x, w13, w2 = torch.randn(6, 32), torch.randn(5, 96, 32), torch.randn(5, 32, 48)
    logits = torch.randn(6, 5)
    assert torch.equal(
        fused_moe(x, w13, w2, *topk_routing(logits, 2)), fused_moe(x, w13, w2, *routing.topk(logits, 2))
    )


@pytest.mark.parametrize("kernel", ["topk_routing", "topk_routing_backward"])
def test_random_calls_under_the_sanitizers(kernel: str) -> None:
    program = HARD / f"random_{kernel}_calls.py"
    assert json.loads(output_under_sanitizers(SOURCES / f"{kernel}.cpp", program, "0", "150"))["done"] == 150


@pytest.mark.parametrize("kernel", ["topk_routing", "topk_routing_backward"])
def test_without_memory_there_is_an_error(kernel: str) -> None:
    """A scratch buffer that cannot be had, and tensors without memory; nothing is written."""
    library = host.load(host.build(SOURCES / f"{kernel}.cpp", kernel, host.choose_instruction_set()))
    launch = library[f"flashmoe_{kernel}"]
    launch.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int]
    tensors = (ctypes.c_void_p * 7)()
    problem = routing._Problem(0, 1, 8, 2, 0, 1, 1, 1, 1.0)
    assert launch(ctypes.addressof(problem), ctypes.addressof(tensors), 1) == 2
    for index in (0, 2, 3, 6) if kernel == "topk_routing" else (0, 1, 2, 6):
        tensors[index] = ctypes.addressof(tensors)
    huge = routing._Problem(0, 1, 2**56, 2, 0, 1, 1, 1, 1.0)
    assert launch(ctypes.addressof(huge), ctypes.addressof(tensors), 1) == 1
