"""Experts with weights of few bits in the lab: what they stand for, and who computes with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cudadent42.base.errors import UsageError
from cudadent42.base.serialise import decode, encode
from cudadent42.model.implementations import UnsupportedCaseError
from cudadent42.operations.moe.case import MoeCase
from cudadent42.operations.moe.hard_inputs import hard_cases
from cudadent42.operations.moe.inputs import MoeInputs, input_sets, random_inputs
from cudadent42.operations.moe.reference import moe_float64
from cudadent42.registry import get
from cudadent42.suites.loader import load_suite
from flashmoe_science.quantized import dequantized

CASE = MoeCase("c", "bf16", 5, hidden=256, intermediate=128, experts=4, top_k=2, weight_bits=4, group=64)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("bits", [4, 8])
def test_both_forms_of_the_weights_are_the_same_values(dtype: str, bits: int) -> None:
    inputs = random_inputs(replace(CASE, dtype=dtype, weight_bits=bits), 1, "cpu")
    assert inputs.quantized is not None
    for wide, matrix in zip((inputs.w13, inputs.w2), inputs.quantized, strict=True):
        assert torch.equal(matrix.wide, wide)
        exact = dequantized(matrix.numbers, matrix.scales, torch.float64)
        assert torch.equal(exact, wide.double())
        assert len(matrix.scales.unique()) == 2
        assert 0.5 < float(wide.double().std()) * wide.shape[-1] ** 0.5 < 2


def test_all_sets_share_the_weights() -> None:
    first, second = input_sets(CASE, 1, 2, "cpu")
    assert first.quantized is second.quantized
    assert random_inputs(replace(CASE, weight_bits=0, group=0), 1, "cpu").quantized is None


def test_the_fewest_bytes_are_those_of_the_stored_weights() -> None:
    wide = replace(CASE, weight_bits=0, group=0)
    weights = 3 * 256 * 128
    touched = CASE.experts_touched
    assert wide.bytes_min - CASE.bytes_min == touched * (2 * weights - weights // 2 - 2 * weights // 64)
    assert CASE.memory_bytes(1) - wide.memory_bytes(1) == 4 * (weights // 2 + 2 * weights // 64)


@pytest.mark.parametrize("name", ["cudadent42", "cudadent42_16bit", "grouped_mm", "expert_loop"])
@pytest.mark.parametrize("bits", [4, 8])
def test_implementations_are_right(name: str, bits: int) -> None:
    case = replace(CASE, weight_bits=bits)
    inputs = random_inputs(case, 1, "cpu")
    exact = moe_float64(inputs, case.activation)
    result = get(name, "moe").prepare(case, inputs)()
    torch.testing.assert_close(result.double(), exact, rtol=2**-6, atol=2**-6)


def test_ours_computes_with_the_stored_weights() -> None:
    """Not with the 16-bit ones beside them."""
    inputs = random_inputs(CASE, 1, "cpu")
    without = replace(inputs, w13=torch.zeros_like(inputs.w13), w2=torch.zeros_like(inputs.w2))
    assert get("cudadent42", "moe").prepare(CASE, without)().count_nonzero() > 0
    assert get("cudadent42_16bit", "moe").prepare(CASE, without)().count_nonzero() == 0


def test_a_case_of_plain_weights_has_nothing_to_widen() -> None:
    plain = replace(CASE, weight_bits=0, group=0)
    with pytest.raises(UnsupportedCaseError, match="dtype already"):
        get("cudadent42_16bit", "moe").prepare(plain, random_inputs(plain, 1, "cpu"))


def test_hard_values_come_with_stored_weights() -> None:
    plain = replace(CASE, name="plain", weight_bits=0, group=0)
    hard = hard_cases((CASE, plain), "cpu")
    assert {each.case.weight_bits for each in hard} == {0, 4}
    for each in hard:
        made = each.make(1, "cpu")
        assert isinstance(made, MoeInputs)
        assert (made.quantized is not None) == bool(each.case.weight_bits)


def test_a_case_is_read_back_and_an_older_one_has_plain_weights() -> None:
    document = encode(CASE)
    assert decode(MoeCase, document) == CASE
    for key in ("weight_bits", "group"):
        del document[key]
    assert decode(MoeCase, document) == replace(CASE, weight_bits=0, group=0)


def test_the_suite() -> None:
    suite = load_suite("moe-int4-cpu")
    assert suite.baseline == "cudadent42_16bit"
    assert {case.weight_bits for case in suite.shapes} == {4}
    assert {case.group for case in suite.shapes} == {64, 128}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("weight_bits = 3", "weight_bits = 3; expected 4 or 8, or none"),
        ("weight_bits = 4, group = 48", "group = 48; expected a multiple of 32 that divides"),
        ("weight_bits = 4, group = 96", "group = 96; expected a multiple of 32 that divides"),
        ("group = 64", "group = 64 without weight_bits"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, more: str, words: str) -> None:
    text = (
        'name = "s"\noperation = "moe"\ndtypes = ["bf16"]\ncase = [{ name = "a", tokens = 1, hidden = 256, '
    )
    (tmp_path / "s.toml").write_text(text + f"intermediate = 128, experts = 4, top_k = 2, {more} }}]\n")
    with pytest.raises(UsageError, match=words):
        load_suite(str(tmp_path / "s.toml"))


def test_the_backward_pass_has_no_stored_weights(tmp_path: Path) -> None:
    text = 'name = "s"\noperation = "moe_backward"\ndtypes = ["bf16"]\ncase = [{ name = "a", tokens = 1, hidden = 256, '
    (tmp_path / "s.toml").write_text(
        text + "intermediate = 128, experts = 4, top_k = 2, weight_bits = 4 }]\n"
    )
    with pytest.raises(UsageError, match="weight_bits"):
        load_suite(str(tmp_path / "s.toml"))
