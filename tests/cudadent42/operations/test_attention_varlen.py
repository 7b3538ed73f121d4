"""Attention over a batch of sequences as an operation: its lengths, its inputs, its reference, and who computes it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from cudadent42.base.errors import UsageError
from cudadent42.model.implementations import Call
from cudadent42.operations import definition
from cudadent42.operations.attention.inputs import AttentionInputs
from cudadent42.operations.attention.reference import attention_float64
from cudadent42.operations.attention_varlen.case import VarlenCase
from cudadent42.operations.attention_varlen.implementations import ALL, prepare_sdpa
from cudadent42.operations.attention_varlen.inputs import hard_inputs, random_inputs, refresh
from cudadent42.operations.attention_varlen.reference import varlen_float64
from cudadent42.plan import Choices, make_plan
from cudadent42.registry import registry
from cudadent42.stages.verify import verify
from cudadent42.suites.loader import load_suite, parse_suite

CASE = VarlenCase("unit", "fp32", 5, 4, 2, longest=60, shortest=7, head_dim=16, page_size=8)
VARIANTS = {
    "decode": CASE,
    "packed": replace(CASE, page_size=0),
    "prompts": replace(CASE, queries=0),
    "full": replace(CASE, queries=0, causal=False),
    "mixed": replace(CASE, chunks=2, chunk=9),
    "window": replace(CASE, queries=3, window=5),
    "more queries": replace(CASE, queries=70),
}
each_variant = pytest.mark.parametrize("case", VARIANTS.values(), ids=VARIANTS)


def nothing() -> None:
    return


def test_lengths_follow_zipfs_law_and_the_case_alone() -> None:
    assert sorted(CASE.seqlens_k, reverse=True) == [60, 30, 20, 15, 12]
    assert sorted(replace(CASE, shortest=25).seqlens_k) == [25, 25, 25, 30, 60]
    assert CASE.seqlens_k == replace(CASE, name="other", dtype="bf16").seqlens_k
    assert len({replace(CASE, draw=draw).seqlens_k for draw in range(10)}) > 3
    assert VARIANTS["mixed"].seqlens_q == (9, 9, 1, 1, 1)
    assert VARIANTS["prompts"].seqlens_q == CASE.seqlens_k


@each_variant
def test_what_is_visible_is_counted(case: VarlenCase) -> None:
    scores = keys_seen = 0
    for queries, keys in zip(case.seqlens_q, case.seqlens_k, strict=True):
        position = torch.arange(queries)[:, None] + keys - queries
        column = torch.arange(keys)
        seen = (column <= position) | (not case.causal)
        if case.window >= 0:
            seen &= column >= position - case.window
        scores += int(seen.sum()) * case.num_heads
        keys_seen += int(seen.any(0).sum())
    assert case.scores == scores
    rows = 2 * case.tokens * case.num_heads + 2 * keys_seen * case.num_kv_heads
    assert case.bytes_min == 4 * 16 * rows


@each_variant
def test_every_slot_without_a_key_is_nan_also_after_a_refresh(case: VarlenCase) -> None:
    inputs = random_inputs(case, 0, 0, "cpu")
    again = random_inputs(case, 0, 0, "cpu")
    assert all(
        torch.equal(a, b) or a.isnan().any() for a, b in zip(inputs.tensors, again.tensors, strict=True)
    )
    for _ in range(2):
        for rows in inputs.rows_of_keys:
            assert rows[inputs.slots].isfinite().all()
            assert int(rows.isnan().all(-1).all(-1).sum()) == len(rows) - sum(case.seqlens_k)
        written = refresh(case, inputs, 3)
        assert [tensor.data_ptr() for tensor in written] == [tensor.data_ptr() for tensor in inputs.tensors]
    assert not torch.equal(inputs.query, again.query)
    if inputs.block_table is not None:
        assert (inputs.block_table[:, -2:] == -1).all()


@each_variant
def test_float64_is_that_of_each_sequence(case: VarlenCase) -> None:
    if case.window >= 0:
        pytest.skip("the reference of attention has no window")
    inputs = random_inputs(case, 0, 0, "cpu")
    result = varlen_float64(case, inputs, nothing)
    token = first = 0
    for queries, keys in zip(case.seqlens_q, case.seqlens_k, strict=True):
        slots = inputs.slots[first : first + keys]
        key, value = (rows[slots].transpose(0, 1)[None] for rows in inputs.rows_of_keys)
        query = inputs.query[token : token + queries].transpose(0, 1)[None]
        alone = attention_float64(AttentionInputs(query, key, value), case.causal)
        torch.testing.assert_close(result[token : token + queries], alone[0].transpose(0, 1))
        token += queries
        first += keys


@each_variant
def test_ours_and_pytorch_agree_with_float64(case: VarlenCase) -> None:
    inputs = random_inputs(case, 1, 0, "cpu")
    exact = varlen_float64(case, inputs, nothing)
    ours: Call = next(each for each in ALL if each.name == "cudadent42").prepare(case, inputs)
    for call in (ours, prepare_sdpa(case, inputs)):
        torch.testing.assert_close(call().double(), exact, rtol=1e-5, atol=1e-5)


def test_a_window_hides_keys_in_float64() -> None:
    case = replace(CASE, batch=1, longest=20, shortest=20, window=0, queries=3)
    inputs = random_inputs(case, 0, 0, "cpu")
    own = inputs.rows_of_keys[1][inputs.slots[-3:]].repeat_interleave(2, 1).double()
    torch.testing.assert_close(varlen_float64(case, inputs, nothing), own)


def test_every_hard_input_can_be_made_and_has_a_reference() -> None:
    for hard in hard_inputs("fp32"):
        inputs = hard.make(0, "cpu")
        result = varlen_float64(hard.case, inputs, nothing)  # type: ignore[arg-type]
        assert result.isnan().any() == hard.kind.startswith("nan")


def test_verification_passes_ours() -> None:
    choices = Choices(suite="varlen-cpu", implementations=("cudadent42",), cases=("mixed",), dtypes=("bf16",))
    report = verify(make_plan(choices, "cpu", registry), emit=lambda event: None)
    judged = [each for each in report.cases if each.implementation == "cudadent42"]
    assert len(judged) > 20
    assert [each for each in judged if not each.passed] == []


@pytest.mark.parametrize("name", ["decode-paged", "prefill-varlen", "mixed", "varlen-cpu"])
def test_suites_have_cases_with_names_of_their_own(name: str) -> None:
    suite = load_suite(name)
    assert suite.operation == "attention_varlen"
    shapes = [(replace(case, name=""), case.seqlens_k) for case in suite.shapes]  # type: ignore[type-var, attr-defined]
    assert len(set(shapes)) == len(shapes)


def test_hidden_cases_are_small_and_others() -> None:
    cases = [case for case in load_suite("decode-paged").shapes if isinstance(case, VarlenCase)]
    unplanned = definition("attention_varlen").unplanned
    assert unplanned is not None
    for case in unplanned(cases, Random(0), 20):
        assert isinstance(case, VarlenCase)
        assert case.longest <= 1024
        assert case.longest not in {each.longest for each in cases}


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ("num_heads = 3, num_kv_heads = 2", "num_heads = 3 is not a multiple"),
        ("num_heads = 2, shortest = 9", "shortest"),
        ("num_heads = 2, chunks = 2", "chunks"),
    ],
)
def test_cases_that_make_no_sense_are_refused(numbers: str, message: str) -> None:
    text = (
        'name = "unit"\noperation = "attention_varlen"\ndtypes = ["fp32"]\n'
        f'case = [{{ name = "a", batch = 1, longest = 8, head_dim = 16, {numbers} }}]\n'
    )
    with pytest.raises(UsageError, match=message):
        parse_suite(text, "unit.toml")
