"""The backward pass of experts as an operation: its float64 is the derivative, and what is wrong is found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from computed_once import computed_once
from cudadent42.base.errors import UsageError
from cudadent42.correctness.truth import find_truth, judge
from cudadent42.model.records import Plan
from cudadent42.operations import definition
from cudadent42.operations.moe import implementations as forward
from cudadent42.operations.moe.reference import expert_loop
from cudadent42.operations.moe_backward import numerics, reference
from cudadent42.operations.moe_backward.case import ROUTINGS, MoeBackwardCase, MoeTrainingStepCase
from cudadent42.operations.moe_backward.implementations import implementations
from cudadent42.operations.moe_backward.inputs import (
    GRADIENTS,
    differentiated,
    hard_cases,
    hard_inputs,
    input_sets,
    packed,
)
from cudadent42.operations.moe_backward.numerics import NUMERICS
from cudadent42.operations.moe_backward.reference import gradients_float64, yardstick
from cudadent42.plan import Choices, make_plan
from cudadent42.registry import registry
from cudadent42.stages.verify import verify
from cudadent42.suites.loader import load_suite, parse_suite

pytestmark = pytest.mark.usefixtures("one_thread")


def case_of(dtype: str = "fp32", **changes: Any) -> MoeBackwardCase:
    case = MoeBackwardCase("unit", dtype, 19, hidden=48, intermediate=32, experts=6, top_k=2)
    return replace(case, **changes)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swigluoai", "relu2_no_mul"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_float64_is_the_derivative(routing: str, activation: str) -> None:
    case = case_of(routing=routing, activation=activation)
    (inputs,) = input_sets(case, 0, 1, "cpu")
    *floats, ids = inputs.forward.tensors
    leaves = [tensor.double().requires_grad_() for tensor in floats]
    output = expert_loop(*leaves, ids, activation)
    expected = packed(torch.autograd.grad(output, leaves, inputs.output_gradient.double()))
    torch.testing.assert_close(gradients_float64(inputs, activation).value, expected)


@pytest.mark.parametrize(
    ("activation", "bias", "layout"),
    [
        ("swigluoai", True, "interleaved"),
        ("silu", True, "concat"),
        ("gelu_tanh", False, "interleaved"),
        ("relu2_no_mul", True, "concat"),
    ],
)
def test_float64_has_the_biases_and_follows_the_layout(activation: str, bias: bool, layout: str) -> None:
    case = case_of(activation=activation, bias=bias, w13_layout=layout)
    (inputs,) = input_sets(case, 0, 1, "cpu")
    leaves = [tensor.double().requires_grad_() for tensor in differentiated(inputs.forward)]
    assert len(leaves) == 4 + 2 * bias
    biases = dict(zip(("w13_bias", "w2_bias"), leaves[4:], strict=bias))
    output = expert_loop(*leaves[:4], inputs.forward.topk_ids, activation, layout, **biases)
    expected = packed(torch.autograd.grad(output, leaves, inputs.output_gradient.double()))
    gradients = gradients_float64(inputs, activation)
    torch.testing.assert_close(gradients.value, expected)
    assert gradients.value.shape == inputs.result_like.shape


def test_routings_are_as_skewed_as_they_say() -> None:
    def busiest(routing: str) -> float:
        case = case_of(tokens=4000, experts=32, top_k=4, routing=routing, hidden=16)
        (inputs,) = input_sets(case, 0, 1, "cpu")
        counts = torch.bincount(inputs.forward.topk_ids.flatten(), minlength=32)
        return float(counts.max() / counts.double().mean())

    assert busiest("uniform") < 1.3 < busiest("router") < busiest("zipf") < busiest("hot") == 8.0


def faults() -> dict[str, Any]:
    def scaled(gradients: list[Tensor]) -> list[Tensor]:
        return [gradient * 1.03 for gradient in gradients]

    def a_row(gradients: list[Tensor]) -> list[Tensor]:
        gradients[0][7] = gradients[0][8]
        return gradients

    def an_expert(gradients: list[Tensor]) -> list[Tensor]:
        gradients[2][1] = gradients[2][2]
        return gradients

    def a_weight(gradients: list[Tensor]) -> list[Tensor]:
        flat = gradients[3].view(-1)
        flat[flat.abs().argmax()] *= 0.8
        return gradients

    return {"scaled": scaled, "a row": a_row, "an expert": an_expert, "a weight": a_weight}


@pytest.mark.parametrize("fault", faults())
def test_what_is_wrong_fails(fault: str) -> None:
    case = case_of("bf16", tokens=80)
    (inputs,) = input_sets(case, 2, 1, "cpu")
    truth = find_truth(case, inputs)
    call = implementations(case.operation)[0].prepare(case, inputs)
    right: Any = call()
    assert judge(truth, "right", right, "random").passed
    wrong = faults()[fault]([gradient.clone() for gradient in right])
    assert not judge(truth, "wrong", wrong, "random").passed


BIASED = {"activation": "swigluoai", "bias": True, "w13_layout": "interleaved"}
"""GPT-OSS's layer as it is."""


@pytest.mark.parametrize("which", [4, 5])
def test_biases_whose_gradients_are_wrong_fail(which: int) -> None:
    """Another expert's, and a tenth too large."""
    case = case_of("bf16", tokens=80, **BIASED)
    (inputs,) = input_sets(case, 2, 1, "cpu")
    truth = find_truth(case, inputs)
    right: Any = implementations(case.operation)[0].prepare(case, inputs)()
    assert judge(truth, "right", right, "random").passed
    for damage in (lambda bias: bias.roll(1, 0), lambda bias: bias * 1.1):
        wrong = [gradient.clone() for gradient in right]
        wrong[which] = damage(wrong[which])
        assert not judge(truth, "wrong", wrong, "random").passed


@pytest.mark.parametrize("name", ["moe_backward", "moe_training_step"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_layers_as_gpt_oss_has_them_are_verified(name: str, dtype: str) -> None:
    case: MoeBackwardCase = case_of(dtype, **BIASED)
    if name == "moe_training_step":
        case = MoeTrainingStepCase(**vars(case))
    (inputs,) = input_sets(case, 3, 1, "cpu")
    truth = find_truth(case, inputs)
    for item in implementations(case.operation):
        if item.name in ("cudadent42", "cudadent42_recompute", "expert_loop", "grouped_mm"):
            gradients: Any = item.prepare(case, inputs)()
            judged = judge(truth, item.name, gradients, "random")
            assert judged.passed, judged.detail


def test_biases_whose_gradients_are_summed_in_16_bits_fail() -> None:
    """As autograd adds the rows of an indexed bias, one after the other, in `grouped_mm`."""
    case = case_of("bf16", tokens=512, experts=4, **BIASED)
    (inputs,) = input_sets(case, 0, 1, "cpu")
    truth = find_truth(case, inputs)
    passed = {
        item.name: judge(truth, item.name, item.prepare(case, inputs)(), "random").passed
        for item in implementations(case.operation)
        if item.name in ("cudadent42", "expert_loop", "grouped_mm")
    }
    assert passed == {"cudadent42": True, "expert_loop": True, "grouped_mm": False}


def test_a_suite_of_training_steps_may_have_biases_by_turns() -> None:
    text = """
        name = "unit"
        operation = "moe_training_step"
        dtypes = ["bf16"]
        [[case]]
        name = "a"
        tokens = 4
        hidden = 16
        intermediate = 16
        experts = 2
        top_k = 1
        activation = "swigluoai"
        bias = true
        w13_layout = "interleaved"
    """
    (case,) = parse_suite(text, "here").shapes
    assert isinstance(case, MoeTrainingStepCase)
    assert (case.bias, case.w13_layout) == (True, "interleaved")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu2_no_mul"])
def test_the_bound_of_each_entry_holds_for_what_is_rounded_once(activation: str, dtype: str) -> None:
    case = case_of(dtype, tokens=60, activation=activation)
    (inputs,) = input_sets(case, 1, 1, "cpu")
    gradients = gradients_float64(inputs, activation)
    error = (yardstick(inputs, activation).double() - gradients.value).abs()
    assert bool((error <= gradients.limit).all()), float((error / gradients.limit).max())
    assert float(error.norm() / gradients.value.norm()) < {"fp32": 1e-6, "bf16": 8e-3, "fp16": 1e-3}[dtype]


def test_weighting_before_the_product_widens_no_bound_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a weight is made of what was not weighted: rounding s g has no part in it."""
    case = case_of("bf16")
    (inputs,) = input_sets(case, 0, 1, "cpu")
    with_it = gradients_float64(inputs, "silu").limit
    monkeypatch.setattr(reference, "_weighted_before", lambda g, down, unit: torch.zeros_like(g @ down))
    without = gradients_float64(inputs, "silu").limit
    of_weights = slice(-case.tokens, None)
    assert torch.equal(with_it[of_weights], without[of_weights])
    assert bool((with_it >= without).all())
    assert not torch.equal(with_it, without)


def test_the_room_for_weighting_before_the_product_is_that_of_its_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    g, down = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((500, 64), (64, 32))
    )
    score = torch.rand(500, 1, generator=generator, dtype=torch.float64) + 0.1
    unit = torch.finfo(torch.bfloat16).eps / 2
    weighted = score * g
    error = (weighted.bfloat16().double() @ down - weighted @ down).abs() / score
    room = reference._weighted_before(g, down, unit)
    assert 0.6 < float((error / room).max()) < reference.FACTOR


def test_hard_inputs_have_gradients_of_every_kind() -> None:
    by_kind = {hard.kind: hard for hard in hard_inputs("fp16")}
    assert {*GRADIENTS, "one_expert", "ids_out_of_range", "no_valid_id", "large_weights"} <= by_kind.keys()
    assert {"nan_token_many", "nan_weight", "nan_expert", "nan_idle_expert", "no_tokens"} <= by_kind.keys()
    assert not {kind for kind in by_kind if kind.startswith("inf_")}
    expanded: Any = by_kind["expanded_gradient"].make(0, "cpu")
    assert expanded.output_gradient.stride() == (0, 0)
    of_timed = hard_cases([case_of("fp32", name="a"), case_of("fp32", name="b", tokens=40)], "cpu")
    assert {hard.case.name for hard in of_timed} == {"one_expert@b", "expanded_gradient@b"}


@pytest.fixture(scope="module")
def _references_once() -> Iterator[None]:
    """A training step is verified on the inputs of the backward pass alone, for which the same is right."""
    exact = computed_once(gradients_float64, count=200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "gradients_float64", lambda inputs, activation, _: exact(inputs, activation))
        patch.setattr(numerics, "yardstick", computed_once(yardstick, count=200))
        yield


@pytest.mark.parametrize("name", ["moe_backward", "moe_training_step"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.usefixtures("_references_once")
def test_ours_and_pytorchs_compositions_are_verified(name: str, dtype: str) -> None:
    case: MoeBackwardCase = case_of(dtype)
    if name == "moe_training_step":
        case = MoeTrainingStepCase(**{**vars(case)})
    names = ("cudadent42", "cudadent42_recompute", "expert_loop")
    plan = Plan("unit", "cpu", (case,), "expert_loop", names, 2, 0, seed=0)
    report = verify(plan, emit=lambda event: None)
    assert {each.implementation for each in report.cases} == set(names)
    assert report.passed, [each.detail for each in report.cases if not each.passed]


def test_a_compiled_composition_is_differentiated_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile gives buffers away that a graph which is kept needs, once it has seen one that is not."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # no C++ is compiled
    case = case_of("bf16", name="kept")
    (inputs,) = input_sets(case, 0, 1, "cpu")
    compiled = next(item for item in implementations(case.operation) if item.name == "grouped_mm_compiled")
    composition = next(item for item in forward.ALL if item.name == compiled.name)
    leaves = inputs.leaves
    with compiled.context():
        output = composition.prepare(case, leaves)()
        torch.autograd.grad(output, differentiated(leaves), inputs.output_gradient)
        call = compiled.prepare(case, inputs)
        first, second = (torch.cat([part.flatten() for part in call()]) for _ in range(2))
    assert torch.equal(first, second)


def test_refresh_writes_what_changes_from_call_to_call() -> None:
    case = case_of()
    step = MoeTrainingStepCase(**vars(case))
    (inputs,) = input_sets(case, 0, 1, "cpu")
    assert NUMERICS.refresh is not None
    before = [tensor.clone() for tensor in inputs.tensors]
    NUMERICS.refresh(case, inputs, 5)
    changed = [not torch.equal(one, other) for one, other in zip(before, inputs.tensors, strict=True)]
    assert changed == [False] * 5 + [True]
    NUMERICS.refresh(step, inputs, 6)
    changed = [not torch.equal(one, other) for one, other in zip(before, inputs.tensors, strict=True)]
    assert changed == [True, False, False, True, True, True]


@pytest.mark.parametrize(
    ("suite", "device", "operation", "count"),
    [
        ("moe-backward", "cuda:0", "moe_backward", 7),
        ("moe-step", "cuda:0", "moe_training_step", 7),
        ("moe-backward", "cpu", "moe_backward", 12),
        ("moe-step", "cpu", "moe_training_step", 12),
    ],
)
def test_suites(suite: str, device: str, operation: str, count: int) -> None:
    plan = make_plan(Choices(suite=suite), device, registry)
    assert {case.operation for case in plan.cases} == {operation}
    assert len(plan.cases) == count
    assert {case.routing for case in plan.cases} == set(ROUTINGS)  # type: ignore[attr-defined]


@pytest.mark.parametrize("suite", ["moe-step", "moe-step-cpu"])
def test_training_steps_race_what_keeps_no_projections(suite: str) -> None:
    assert "cudadent42_recompute" in load_suite(suite).implementations


def test_what_recomputes_keeps_no_projections() -> None:
    case = case_of()
    (inputs,) = input_sets(case, 0, 1, "cpu")
    kept = {}
    for item in implementations(case.operation):
        if not item.name.startswith("cudadent42"):
            continue
        shapes: list[tuple[int, ...]] = []

        def keep(tensor: Tensor, shapes: list[tuple[int, ...]] = shapes) -> Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            item.prepare(case, inputs)
        kept[item.name] = shapes
    projections = (case.tokens * case.top_k, 2 * case.intermediate)
    assert projections in kept["cudadent42"]
    assert projections not in kept["cudadent42_recompute"]


@pytest.mark.parametrize("changes", [{}, BIASED], ids=["plain", "biased"])
@pytest.mark.parametrize("case_type", [MoeBackwardCase, MoeTrainingStepCase])
def test_profiles_leave_gradients_out(case_type: type[MoeBackwardCase], changes: dict[str, Any]) -> None:
    case = case_type(**vars(case_of(**changes)))
    (inputs,) = input_sets(case, 0, 1, "cpu")
    calls = definition(case.operation).without(case, inputs).calls
    assert list(calls) == ["none", "token_gradient", "weight_gradients", "routing_gradient"]
    shapes = {part: tuple(call().shape) for part, call in calls.items()}  # type: ignore[attr-defined]
    of_tokens, of_w13 = inputs.forward.hidden_states.shape, inputs.forward.w13.shape
    assert shapes == {
        "none": of_tokens,
        "token_gradient": of_w13,
        "weight_gradients": of_tokens,
        "routing_gradient": of_tokens,
    }


def test_a_routing_that_there_is_not_is_refused() -> None:
    text = """
        name = "unit"
        operation = "moe_backward"
        dtypes = ["fp32"]
        baseline = "expert_loop"
        implementations = ["expert_loop"]
        repeats = 2
        case = [{ name = "a", tokens = 4, hidden = 16, intermediate = 16, experts = 2, top_k = 1, routing = "zip" }]
    """
    with pytest.raises(
        UsageError, match=r"unknown routing 'zip'; expected one of router, .*did you mean 'zipf'"
    ):
        parse_suite(text, "unit.toml")


def test_operations_are_counted() -> None:
    case = case_of()
    forward = 6 * case.tokens * case.top_k * case.hidden * case.intermediate
    assert case.flops == 2 * forward
    assert MoeTrainingStepCase(**vars(case)).flops == 3 * forward
