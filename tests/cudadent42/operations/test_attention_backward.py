"""The backward pass as an operation: its float64 is the derivative, its bound holds for what is right alone."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cudadent42.correctness.truth import find_truth, judge, judge_gathered
from cudadent42.model.records import Plan
from cudadent42.operations import definition
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention.inputs import AT_TIMED_SHAPES
from cudadent42.operations.attention.reference import attention_float64
from cudadent42.operations.attention_backward.case import AttentionBackwardCase, AttentionTrainingStepCase
from cudadent42.operations.attention_backward.implementations import TRAINED, implementations, sdpa_gradients
from cudadent42.operations.attention_backward.inputs import (
    GRADIENTS,
    BackwardInputs,
    hard_cases,
    hard_inputs,
    packed,
    random_inputs,
)
from cudadent42.operations.attention_backward.numerics import NUMERICS
from cudadent42.operations.attention_backward.parts import calls_on_cuda, taken_on_cuda
from cudadent42.operations.attention_backward.reference import gradients_float64
from cudadent42.plan import Choices, make_plan
from cudadent42.registry import registry
from cudadent42.stages.verify import units, verify
from flashmoe_science.configs.ablation import Ablation
from flashmoe_science.configs.attention.backward import PortableBackward
from flashmoe_science.configs.attention.backward_hopper import HopperBackward
from flashmoe_science.configs.attention.backward_two_pass import TwoPassBackward
from flashmoe_science.cuda.attention.gradients import explain
from flashmoe_science.cuda.device import GPUS

SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "fewer queries": {"causal": True, "seqlen_q": 5},
    "more queries": {"causal": True, "seqlen_k": 5},
    "grouped heads": {"num_heads": 6, "num_kv_heads": 2},
    "one key": {"seqlen_k": 1},
}


def case_of(dtype: str = "fp32", **changes: Any) -> AttentionBackwardCase:
    return replace(AttentionBackwardCase("unit", dtype, 2, 2, 2, 19, 23, 16), **changes)


@pytest.mark.parametrize("name", SHAPES)
def test_float64_is_the_derivative(name: str) -> None:
    """Of a dense forward pass in float64, by autograd; and of the forward's own reference, by differences."""
    case = case_of(**SHAPES[name])
    inputs = random_inputs(case, 0, 0, "cpu")
    leaves = [tensor.double().requires_grad_() for tensor in inputs.tensors[:3]]
    query, key, value = leaves
    group = case.num_heads // case.num_kv_heads
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scores = query @ key.mT * case.head_dim**-0.5
    if case.causal:
        offset = case.seqlen_k - case.seqlen_q
        seen = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool).tril(offset)
        scores = scores.masked_fill(~seen, -1e300)
        output = torch.where(seen.any(-1)[:, None], scores.softmax(-1) @ value, 0.0)
    else:
        output = scores.softmax(-1) @ value
    reference = attention_float64(
        type("Forward", (), {**vars(inputs), "scale": case.head_dim**-0.5})(),
        case.causal,  # type: ignore[arg-type]
    )
    torch.testing.assert_close(output.detach(), reference)
    expected = packed(torch.autograd.grad(output, leaves, inputs.output_gradient.double()))
    torch.testing.assert_close(gradients_float64(inputs, case.causal).value, expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_bound_of_each_entry_holds_for_pytorch(dtype: str, causal: bool) -> None:
    """Without what twice its own error would allow."""
    case = case_of(dtype, seqlen_q=96, seqlen_k=96, head_dim=64, causal=causal)
    inputs = random_inputs(case, 1, 0, "cpu")
    gradients = gradients_float64(inputs, causal)
    error = (sdpa_gradients(case, inputs).double() - gradients.value).abs()
    assert bool((error <= gradients.limit).all()), float((error / gradients.limit).max())


def faults() -> dict[str, Any]:
    def scaled(gradients: Tensor) -> Tensor:
        return gradients * 1.03

    def one_row(gradients: Tensor) -> Tensor:
        wrong = gradients.clone()
        wrong[7] = wrong[8]
        return wrong

    def one_entry(gradients: Tensor) -> Tensor:
        wrong = gradients.clone()
        wrong[-1, -1] += 0.2 * gradients.abs().amax()
        return wrong

    return {"scaled": scaled, "a row": one_row, "an entry": one_entry}


@pytest.mark.parametrize("fault", faults())
def test_what_is_wrong_fails(fault: str) -> None:
    case = case_of("bf16", seqlen_q=64, seqlen_k=64, head_dim=32)
    inputs = random_inputs(case, 2, 0, "cpu")
    truth = find_truth(case, inputs)
    gradients = sdpa_gradients(case, inputs)
    wrong = faults()[fault](gradients)
    rows = [tensor.numel() // case.head_dim for tensor in inputs.tensors[:3]]
    split = [
        part.reshape(like.shape) for part, like in zip(wrong.split(rows), inputs.tensors[:3], strict=True)
    ]
    right = [
        part.reshape(like.shape) for part, like in zip(gradients.split(rows), inputs.tensors[:3], strict=True)
    ]
    assert judge(truth, "right", right, "random").passed
    result = judge(truth, "wrong", split, "random")
    assert not result.passed
    assert "rows have an entry over its own bound" in result.detail or fault == "scaled"


def test_hard_inputs_have_gradients_of_every_kind() -> None:
    by_kind = {hard.kind: hard for hard in hard_inputs("fp16")}
    assert set(GRADIENTS) <= set(by_kind)
    assert {"nan_query", "nan_value", "no_keys", "no_queries"} <= set(by_kind)
    strange = {kind for kind in by_kind if kind.startswith(("nan_key", "inf"))}
    assert strange == {"nan_key_causal", "inf_key", "inf_value"}
    assert {kind for kind, hard in by_kind.items() if not hard.asked_on("cuda:0")} == strange
    expanded = by_kind["expanded_gradient"].make(0, "cpu").tensors[3]
    assert expanded.stride() == (0, 0, 0, 0)


def test_hard_values_at_timed_shapes_are_the_forward_s_and_hard_gradients() -> None:
    """NaN of a query with a causal mask is asked of CPUs alone, NaN of a key of none."""
    kinds = ["expanded_gradient", "small_gradient", *AT_TIMED_SHAPES]
    kinds.remove("nan_key")
    assert {"large_logits", "dominant_key", "rising_maximum", "nan_query"} <= set(kinds)
    for causal, device in itertools.product((False, True), ("cpu", "cuda:0")):
        hard = hard_cases([case_of("bf16", causal=causal)], device)
        asked = [kind for kind in kinds if not (causal and device != "cpu" and kind == "nan_query")]
        assert [each.kind for each in hard] == asked
        assert all((each.case.head_dim, each.case.causal) == (16, causal) for each in hard)
    assert hard_cases([case_of("bf16", seqlen_k=0)], "cpu") == ()


def test_rows_without_keys_are_asked_of_every_kernel() -> None:
    """On an H200: one pass at both head dims, steps of 80 rows, two passes."""
    kernels = {}
    for hard in hard_inputs("bf16"):
        if hard.kind.startswith("more_queries"):
            case = hard.case
            assert isinstance(case, AttentionBackwardCase)
            assert case.causal
            assert case.seqlen_q > case.seqlen_k
            query, key = (
                torch.empty(
                    case.batch, case.num_heads, rows, case.head_dim, dtype=torch.bfloat16, device="meta"
                )
                for rows in (case.seqlen_q, case.seqlen_k)
            )
            kernels[hard.kind] = explain(query, key, key, causal=True, device=GPUS["H200"]).configuration
            assert hard.asked_on("cpu") == (hard.kind != "more_queries_80_rows")
    assert kernels["more_queries_128"] == HopperBackward(128, True, converts=True)
    assert kernels["more_queries_80_rows"] == HopperBackward(128, True, wide=True)
    assert kernels["more_queries_256"] == TwoPassBackward(256, True)


@pytest.mark.parametrize("kind", ["large_logits", "dominant_key", "rising_maximum", "nan_query"])
@pytest.mark.parametrize("causal", [False, True])
def test_this_project_s_gradients_pass_at_a_timed_shape(causal: bool, kind: str) -> None:
    cases = [case_of("bf16", seqlen_q=130, seqlen_k=130, head_dim=128, causal=causal)]
    (hard,) = (hard for hard in hard_cases(cases, "cpu") if hard.kind == kind)
    case, inputs = hard.case, hard.make(3, "cpu")
    assert isinstance(case, AttentionBackwardCase)
    ours = {each.name: each for each in implementations(case.operation)}["cudadent42"]
    result = packed(ours.prepare(case, inputs)())  # type: ignore[arg-type]
    assert judge_gathered(find_truth(case, inputs), "ours", result, kind).passed


def test_what_kernels_for_hopper_do_not_take_is_asked_of_cpus() -> None:
    case = case_of("bf16")
    plans = [
        Plan("unit", device, (case,), "pytorch", ("pytorch", "cudadent42"), 2, 0, seed=0)
        for device in ("cpu", "cuda:0")
    ]
    on_cpu, on_gpu = ([unit.kind for unit in units(plan)] for plan in plans)
    assert [kind for kind in on_cpu if kind not in on_gpu] == ["nan_key_causal", "inf_key", "inf_value"]
    assert set(on_gpu) - set(on_cpu) == {"more_queries_80_rows"}  # whose scores take a CPU too long


def row_by_row(inputs: BackwardInputs) -> Tensor:
    """With a causal mask, by autograd of each row and the keys that it sees, and of nothing else."""
    query, key, value, outer = (tensor.double() for tensor in inputs.tensors)
    sums = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    offset = key.shape[2] - query.shape[2]
    for row in range(max(0, -offset), query.shape[2]):
        seen = slice(0, row + offset + 1)
        leaves = [
            part.clone().requires_grad_()
            for part in (query[:, :, row : row + 1], key[:, :, seen], value[:, :, seen])
        ]
        weights = (leaves[0] @ leaves[1].mT * query.shape[-1] ** -0.5).softmax(-1)
        gradients = torch.autograd.grad(weights @ leaves[2], leaves, outer[:, :, row : row + 1])
        sums[0][:, :, row : row + 1] += gradients[0]
        sums[1][:, :, seen] += gradients[1]
        sums[2][:, :, seen] += gradients[2]
    return packed(sums)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *((where, torch.nan) for where in ("query", "key", "value", "output_gradient")),
        *((where, torch.inf) for where in ("query", "key", "value")),
    ],
)
def test_the_float64_result_is_by_definition_where_something_is_hidden(where: str, value: float) -> None:
    """Nothing of what a row does not see is in its sums, not even times zero, and no limit is lost for it. With an
    infinite gradient of the output, the order of sums decides what is NaN."""
    case = case_of("fp32", seqlen_q=9, seqlen_k=7, head_dim=8, causal=True)
    inputs = random_inputs(case, 1, 0, "cpu")
    getattr(inputs, where)[:, :, 5, 3] = value
    gradients = gradients_float64(inputs, causal=True)
    expected = row_by_row(inputs)
    assert bool(expected.isnan().any())
    assert bool(expected.isfinite().any())
    torch.testing.assert_close(gradients.value, expected, equal_nan=True)
    assert bool(gradients.limit[gradients.value.isfinite()].isfinite().all())


@pytest.mark.parametrize(
    "kind", ["nan_query", "nan_key_causal", "nan_value", "inf_key", "inf_value", "no_keys", "no_queries"]
)
def test_nan_and_empty_sequences_are_judged(kind: str) -> None:
    """This project's kernels pass; NaN in a row that has none, or none where it must be, does not."""
    hard = {hard.kind: hard for hard in hard_inputs("bf16")}[kind]
    case, inputs = hard.case, hard.make(3, "cpu")
    assert isinstance(case, AttentionBackwardCase)
    truth = find_truth(case, inputs)
    ours = {each.name: each for each in implementations(case.operation)}["cudadent42"]
    result = packed(ours.prepare(case, inputs)())  # type: ignore[arg-type]
    assert judge_gathered(truth, "ours", result, kind).passed
    assert bool(truth.reference.isnan().any()) == kind.startswith(("nan", "inf"))
    for spoilt in (torch.zeros_like(result), torch.full_like(result, torch.nan)):
        assert judge_gathered(truth, "wrong", spoilt, kind).passed == bool((spoilt == truth.reference).all())


def test_operations_count() -> None:
    forward = AttentionCase(**{f.name: getattr(case_of(), f.name) for f in fields(AttentionCase)})
    step = AttentionTrainingStepCase(**{f.name: getattr(case_of(), f.name) for f in fields(AttentionCase)})
    assert case_of().flops == 2.5 * forward.flops
    assert step.flops == case_of().flops + forward.flops


@pytest.mark.parametrize(
    ("suite", "device", "name", "cells"),
    [
        ("backward", "cuda:0", "attention_backward", 36),
        ("training-step", "cuda:0", "attention_training_step", 36),
        ("backward", "cpu", "attention_backward", 24),
        ("training-step", "cpu", "attention_training_step", 24),
    ],
)
def test_suites(suite: str, device: str, name: str, cells: int) -> None:
    plan = make_plan(Choices(suite=suite), device, registry)
    assert plan.operation == name
    assert len(plan.cases) == cells
    assert {implementation.name for implementation in implementations(name)} == set(TRAINED)
    if device != "cpu":
        assert {case.batch * case.seqlen_q for case in plan.cases} == {16384}  # type: ignore[attr-defined]
        assert {case.num_heads * case.head_dim for case in plan.cases} == {2048}  # type: ignore[attr-defined]


@pytest.mark.parametrize("case_type", [AttentionBackwardCase, AttentionTrainingStepCase])
def test_pytorch_is_verified_on_the_hard_inputs_too(case_type: type[AttentionBackwardCase]) -> None:
    """By a plug-in with this project's conventions: the hard inputs are asked of those."""
    case = case_type("unit", "bf16", 1, 2, 2, 32, 32, 32, True)
    plan = Plan("unit", "cpu", (case,), "pytorch", ("pytorch", "pytorch_math"), 2, 0, seed=0)
    report = verify(plan, emit=lambda event: None)
    assert report.cases
    assert report.passed, [each.detail for each in report.cases if not each.passed]
    assert NUMERICS.gathered is packed


@pytest.mark.parametrize("case_type", [AttentionBackwardCase, AttentionTrainingStepCase])
def test_profiles_leave_gradients_out(case_type: type[AttentionBackwardCase]) -> None:
    case = case_type(**vars(case_of(num_heads=4)))
    inputs = random_inputs(case, 0, 0, "cpu")
    calls = definition(case.operation).without(case, inputs).calls
    assert list(calls) == ["none", "query_gradient", "key_value_gradients"]
    heads = {part: call().shape[1] for part, call in calls.items()}  # type: ignore[attr-defined]
    assert heads == {"none": 4, "query_gradient": 2, "key_value_gradients": 4}


@pytest.mark.parametrize(
    ("shape", "causal", "gpu", "kernel", "parts"),
    [
        ((16, 8192, 64), False, "H200", "hopper", ["exponentials", "loads", "sums"]),
        ((16, 8192, 128), True, "H200", "hopper", ["exponentials", "mask", "loads", "sums"]),
        ((264, 200, 64), True, "H200", "short", ["exponentials", "mask", "loads"]),
        ((264, 200, 64), False, "H200", "short", ["exponentials", "loads"]),
        ((16, 4096, 256), True, "H200", "two_pass", ["exponentials", "mask", "loads"]),
        ((16, 4096, 128), True, "A100", "portable", ["exponentials", "mask", "loads"]),
        ((16, 4096, 192), False, "A100", "portable", ["exponentials", "loads"]),
    ],
)
def test_profiles_on_cuda_leave_out_what_the_kernel_has(
    shape: tuple[int, int, int], causal: bool, gpu: str, kernel: str, parts: list[str]
) -> None:
    """Beside gradients. Each such kernel is the whole one but for its part."""
    heads, length, head_dim = shape
    case = AttentionBackwardCase("unit", "bf16", 1, heads, heads, length, length, head_dim, causal)
    tensor = torch.empty(1, heads, length, head_dim, dtype=torch.bfloat16, device="meta")
    taken = taken_on_cuda(case, BackwardInputs(tensor, tensor, tensor, tensor), GPUS[gpu])
    assert list(taken) == ["none", "query_gradient", "key_value_gradients", *parts]
    whole = taken["none"].choice
    assert whole.kernel.value == kernel
    for part in parts:
        assert (taken[part].choice.kernel, taken[part].left_out) == (whole.kernel, ())
        assert ablations(taken[part].choice.configuration) == {Ablation[part.upper()]}
    assert ablations(whole.configuration) == {Ablation.NONE}
    assert (taken["query_gradient"].left_out, taken["key_value_gradients"].left_out) == ((0,), (1, 2))


def test_profiles_of_a_kernel_that_the_environment_names_leave_out_what_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It makes all three gradients or none."""
    monkeypatch.setenv("FLASHMOE_CUDA_BACKWARD", "short")
    case = case_of("bf16", seqlen_q=128, seqlen_k=128, head_dim=64)
    taken = taken_on_cuda(case, random_inputs(case, 0, 0, "cpu"), GPUS["H200"])
    assert list(taken) == ["none", "exponentials", "loads"]


def ablations(configuration: Any) -> set[Ablation]:
    if isinstance(configuration, PortableBackward):
        return {tile.ablation for tile in (configuration.query, *configuration.key_tiles)}
    return {configuration.ablation}


def test_profiles_on_cuda_name_the_kernel_of_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for the GPU's two passes."""
    given: list[Any] = []

    def forward(query: Tensor, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return query.clone(), query.new_zeros(query.shape[:3])

    def backward(gradient: Tensor, *tensors: Tensor | None, choice: Any, needs: Any, **options: Any) -> Any:
        given.append((choice, tuple(needs)))
        return tuple(
            torch.zeros_like(tensor) if needed and tensor is not None else None
            for needed, tensor in zip(needs, tensors[:3], strict=True)
        )

    monkeypatch.setattr("flashmoe_science.cuda.attention.forward", forward)
    monkeypatch.setattr("flashmoe_science.cuda.attention.backward", backward)
    case = case_of("bf16", seqlen_q=128, seqlen_k=128, head_dim=64, causal=True)
    inputs = random_inputs(case, 0, 0, "cpu")
    taken = taken_on_cuda(case, inputs, GPUS["H200"])
    for part, call in calls_on_cuda(case, inputs, taken).items():
        call()
        choice, needs = given.pop()
        assert choice is taken[part].choice
        assert needs == tuple(index not in taken[part].left_out for index in range(3))
