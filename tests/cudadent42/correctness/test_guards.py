"""Writes past what a candidate was given are found, on either side, and memory that is as it was passes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from cudadent42.correctness.guards import (
    GUARD_BYTES,
    damage,
    empty_like,
    guarded,
    guarding_outputs,
    repair,
)
from cudadent42.model.records import Plan
from cudadent42.operations import numerics
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention.inputs import AttentionInputs, hard_inputs
from cudadent42.operations.attention_backward.inputs import BackwardInputs
from cudadent42.operations.moe.case import MoeCase
from cudadent42.scaffold import Kind, create
from cudadent42.stages.verify import verify

CASE = AttentionCase("unit", "bf16", 1, 2, 2, 17, 17, 32)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def inputs_on(device: str) -> AttentionInputs:
    inputs = numerics(CASE).input_sets(CASE, 0, 1, device)[0]
    assert isinstance(inputs, AttentionInputs)
    return inputs


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_is_the_same_and_undamaged(device: str) -> None:
    original = inputs_on(device)
    (copy,), guards = guarded([original])
    for one, other in zip(original.tensors, copy.tensors, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert one.data_ptr() % 256 == other.data_ptr() % 256
    assert len(guards) == 3
    assert damage(guards) == ""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("element", "side"), [(-1, "before"), (0, "past the end of")])
def test_one_element_beyond_a_tensor_is_found_named_and_repaired(
    device: str, element: int, side: str
) -> None:
    (copy,), guards = guarded([inputs_on(device)])
    beyond = element if element < 0 else copy.key.numel()
    memory = torch.as_strided(copy.key, (1,), (1,), storage_offset=copy.key.storage_offset() + beyond)
    memory.fill_(1.0)
    assert damage(guards) == f"wrote 2 bytes {side} its key"
    repair(guards)
    assert damage(guards) == ""


@pytest.mark.parametrize("hard", hard_inputs("fp16"), ids=lambda hard: hard.kind)
def test_hard_inputs_keep_their_layout(hard: object) -> None:
    """Transposed, empty, sliced."""
    original = hard.make(1, "cpu")  # type: ignore[attr-defined]
    (copy,), guards = guarded([original])
    for one, other in zip(original.tensors, copy.tensors, strict=True):
        assert (one.shape, one.stride()) == (other.shape, other.stride())
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    assert damage(guards) == ""


def test_a_gradient_that_is_expanded_keeps_its_strides() -> None:
    gradient = torch.randn(1, 1, 1, 1).expand(2, 3, 5, 8)
    inputs = BackwardInputs(*(torch.randn(2, 3, 5, 8) for _ in range(3)), gradient)
    (copy,), guards = guarded([inputs])
    assert copy.output_gradient.stride() == (0, 0, 0, 0)
    assert torch.equal(copy.output_gradient, gradient)
    assert damage(guards) == ""


def test_experts_that_sets_share_stay_shared() -> None:
    case = MoeCase("unit", "bf16", 4, 32, 32, 4, 2)
    copies, guards = guarded(numerics(case).input_sets(case, 0, 3, "cpu"))
    assert len({copy.w13.data_ptr() for copy in copies}) == 1
    assert len({copy.hidden_states.data_ptr() for copy in copies}) == 3
    assert len(guards) == 2 + 3 * 3


def test_outputs_have_bands_inside_and_none_outside() -> None:
    like = torch.zeros(3, 5, dtype=torch.float16).t()
    with guarding_outputs() as guards:
        output = empty_like(like)
    assert output.stride() == torch.empty_like(like).stride()
    assert output.isnan().all()
    ctypes.memset(output.data_ptr() + 2 * output.numel(), 0, 8)
    assert damage(guards) == "wrote 8 bytes past the end of its output"
    with guarding_outputs() as guards:
        pass
    empty_like(like)
    assert guards == []
    assert GUARD_BYTES >= 8


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        ("((float *)problem->output)[17 * 2 * 64] = 1.0f;", "wrote 4 bytes past the end of its output"),
        ("((char *)problem->output)[-1] = 1;", "wrote 1 bytes before its output"),
        ("((float *)problem->value)[17 * 2 * 64 + 1] = 1.0f;", "wrote 4 bytes past the end of its value"),
    ],
)
def test_a_kernel_that_writes_too_far_fails(tmp_path: Path, fault: str, detail: str) -> None:
    create("mine", Kind.CPU, tmp_path)
    source = tmp_path / "mine" / "mine.cpp"
    head = "CUDADENT42_EXPORT int mine(const Cudadent42Attention *problem) {\n"
    text = source.read_text()
    assert head in text
    only = "    if (problem->seqlen_q != 17) return CUDADENT42_UNSUPPORTED;\n"
    source.write_text(text.replace(head, f"{head}{only}    {fault}\n"))
    kernel = str(tmp_path / "mine" / "mine.toml")
    case = AttentionCase("unit", "fp32", 1, 2, 2, 17, 17, 64)
    plan = Plan("unit", "cpu", (case,), "pytorch", ("pytorch", kernel), 2, 0, seed=0)
    results = [each for each in verify(plan, emit=lambda event: None).cases if each.implementation == kernel]
    assert {(each.passed, each.detail) for each in results if each.input == "random"} == {(False, detail)}
