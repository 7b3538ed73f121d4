"""Inputs get other values in the same memory; an output belongs to the values of now or it does not."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch

from cudadent42.correctness.forms import wrong_kind
from cudadent42.integrity.originals import Originals
from cudadent42.integrity.outputs import copies, grossly_differs, same
from cudadent42.integrity.refill import FreshInputs, checksums
from cudadent42.model.cases import Case
from cudadent42.operations import definition, numerics
from cudadent42.operations.attention import inputs
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention.inputs import write_normal
from cudadent42.operations.attention_backward.case import AttentionBackwardCase, AttentionTrainingStepCase
from cudadent42.operations.moe.case import MoeCase

SIZES = ("fp32", 1, 2, 2, 24, 24, 32)
CASES: list[tuple[Case, set[str]]] = [
    (AttentionCase("a", *SIZES), {"query", "key", "value"}),
    (AttentionBackwardCase("b", *SIZES), {"output_gradient"}),
    (AttentionTrainingStepCase("c", *SIZES), {"query", "key", "value", "output_gradient"}),
    (MoeCase("d", "bf16", 6, 16, 8, 4, 2), {"hidden_states", "topk_weights", "topk_ids"}),
]


@pytest.mark.parametrize(("case", "written"), CASES, ids=lambda item: getattr(item, "operation", ""))
def test_what_changes_between_calls_is_written_and_nothing_else(case: Case, written: set[str]) -> None:
    sets = numerics(case).input_sets(case, 0, 2, "cpu")
    inputs = FreshInputs(case, sets)
    inputs.refill(1)
    before = [
        {name: tensor.clone() for name, tensor in vars(each).items() if isinstance(tensor, torch.Tensor)}
        for each in sets
    ]
    inputs.refill(2)
    for old, each in zip(before, sets, strict=True):
        assert {name for name in old if not torch.equal(old[name], getattr(each, name))} == written
    earlier = inputs.earlier(1)
    assert len(earlier) == 1
    assert all(torch.equal(before[1][name], getattr(earlier[0], name)) for name in before[1])
    inputs.refill(1)
    assert all(torch.equal(before[0][name], getattr(sets[0], name)) for name in before[0])


def test_a_write_by_somebody_else_is_seen() -> None:
    case, _ = CASES[0]
    inputs = FreshInputs(case, numerics(case).input_sets(case, 0, 2, "cpu"))
    inputs.refill(1)
    assert not inputs.changed
    inputs.sets[1].tensors[2][0, 0, 0, 0] += 1
    assert inputs.changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [0, 1, 3, 7, 8, 64])
@pytest.mark.parametrize("view", ["whole", "offset", "apart"])
def test_every_bit_counts_in_a_sum(dtype: torch.dtype, size: int, view: str) -> None:
    """Also where memory is no whole number of words, begins within one, or lies apart."""
    memory = torch.arange(4 * size + 1, dtype=torch.float32, device="cpu").to(dtype)
    tensor = {"whole": memory[: 2 * size], "offset": memory[1 : 2 * size + 1], "apart": memory[::2]}[view]
    (before,) = checksums([tensor])
    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
    for number in range(len(bits)):
        bits[number] ^= 1
        assert checksums([tensor]) != [before]
        bits[number] ^= 1
    assert checksums([tensor]) == [before]


@pytest.mark.parametrize("case", [case for case, _ in CASES], ids=lambda case: case.operation)
def test_shapes_that_no_plan_shows(case: Case) -> None:
    import random

    unplanned: Callable[..., list[Case]] | None = definition(case.operation).unplanned  # type: ignore[assignment]
    assert unplanned is not None
    shapes = unplanned([case], random.Random(3), 20)
    assert len(shapes) == 20
    assert all(type(each) is type(case) for each in shapes)
    assert all(each.tokens != case.tokens for each in shapes)
    assert all(0 < each.flops <= case.flops for each in shapes)


def test_a_result_of_other_inputs_is_far_off_and_rounding_is_not() -> None:
    reference = torch.randn(64, 64)
    assert not grossly_differs(reference.bfloat16(), reference)
    assert grossly_differs(torch.randn(64, 64), reference)
    assert grossly_differs(torch.zeros(64, 64), reference)
    assert grossly_differs(torch.full((64, 64), float("nan")), reference)
    assert grossly_differs(reference[:1], reference)


def test_an_output_that_changes_behind_its_call() -> None:
    output = torch.randn(8)
    before = copies((output, output * 2))
    pair = (output, output * 2)
    assert same(pair, before)
    output[0] += 1
    assert not same(pair, before)


def test_only_plain_tensors_are_results() -> None:
    class Lazy(torch.Tensor):
        pass

    assert wrong_kind(torch.ones(2)) == ""
    assert wrong_kind((torch.ones(2), torch.ones(2))) == ""
    assert "Lazy" in wrong_kind(torch.ones(2).as_subclass(Lazy))
    assert "sparse" in wrong_kind(torch.ones(2, 2).to_sparse())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_drawn_values_are_normal_new_for_each_seed_and_the_same_whatever_the_strides(
    dtype: torch.dtype,
) -> None:
    def drawn(seed: int, tensor: torch.Tensor) -> torch.Tensor:
        write_normal(tensor, seed)
        return tensor

    memory = torch.zeros(256, 513, dtype=dtype, device="cpu")
    values = drawn(1, torch.zeros(256, 512, dtype=dtype, device="cpu"))
    assert torch.equal(values, drawn(1, memory[:, :512]))
    assert float((values == drawn(2, torch.zeros_like(values))).float().mean()) < 0.01
    wide = values.double()
    count = wide.numel()
    assert abs(float(wide.mean())) < 5 / count**0.5
    assert abs(float(wide.square().mean()) - 1) < 5 * (2 / count) ** 0.5
    assert abs(float(wide.pow(4).mean()) - 3) < 5 * (96 / count) ** 0.5
    assert abs(float((wide[:, 1:] * wide[:, :-1]).mean())) < 5 / count**0.5
    assert 3.5 < float(wide.abs().max()) < 6.0


def test_what_values_are_drawn_from_and_summed_with_is_not_changed_unseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who makes all values zero knows all results: that was a write to the table of quantiles, or to numpy.take."""

    def drawn() -> torch.Tensor:
        tensor = torch.zeros(4, 4096, dtype=torch.bfloat16, device="cpu")
        write_normal(tensor, 1)
        return tensor

    before, originals = drawn(), Originals()
    for dtype in (torch.float16, torch.bfloat16):
        table = inputs._quantiles(dtype)
        with pytest.raises(ValueError, match="read-only"):
            table[:] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            table.flags.writeable = True
    with monkeypatch.context() as patch:
        for name in ("take", "add", "frombuffer", "count_nonzero", "int16", "uint16"):
            patch.setattr(numpy, name, None)
        assert torch.equal(drawn(), before)
        assert checksums([before]) != checksums([torch.zeros_like(before)])
    assert originals.replaced() == []
    monkeypatch.setattr(inputs, "_BF16_QUANTILES", bytes(1 << 17))
    assert not drawn().any()
    assert [each.name for each in originals.replaced()] == [f"{inputs.__name__}._BF16_QUANTILES"]
