"""Verification lets right results pass and catches the wrong ones that fixed tolerances let through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cudadent42.correctness.norms import error_norms
from cudadent42.correctness.truth import failure, find_truth, heartbeat, judge
from cudadent42.model.events import Alive, CaseVerified, Event
from cudadent42.model.records import Plan, VerifiedCase, VerifyReport
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention.inputs import AttentionInputs, hard_cases, hard_inputs, random_inputs
from cudadent42.operations.attention.reference import attention_float64
from cudadent42.registry import get, load
from cudadent42.stages.bench.excluded import not_timed
from cudadent42.stages.verify import poisoned_call, units, verify

DTYPES = ["fp16", "bf16", "fp32"]


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Small problems on a busy machine lose far more to waiting for each other's threads than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_plan(
    *implementations: str, dtype: str = "bf16", cases: tuple[AttentionCase, ...] | None = None
) -> Plan:
    small = AttentionCase("small", dtype, 1, 2, 2, 96, 96, 64)
    return Plan("test", "cpu", cases or (small,), "pytorch", ("pytorch", *implementations), 8, 1, seed=5)


def right_to_rounding(inputs: AttentionInputs, causal: bool) -> Tensor:
    return attention_float64(inputs, causal).to(inputs.query.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(64, 64), (33, 80), (80, 33), (1, 7)])
def test_reference_equals_direct_formula(dtype: str, causal: bool, seqlen_q: int, seqlen_k: int) -> None:
    case = AttentionCase("c", dtype, 2, 4, 2, seqlen_q, seqlen_k, 16, causal)
    inputs = random_inputs(case, 0, 0, "cpu")
    key, value = (t.double().repeat_interleave(2, dim=1) for t in (inputs.key, inputs.value))
    scores = inputs.query.double() @ key.transpose(-1, -2) / 4.0
    if causal:
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
        scores = scores.masked_fill(~visible, -torch.inf)
    expected = torch.softmax(scores, dim=-1).nan_to_num(0.0) @ value
    torch.testing.assert_close(attention_float64(inputs, causal), expected, rtol=1e-12, atol=1e-12)


def test_reference_without_keys_is_zero() -> None:
    inputs = random_inputs(AttentionCase("c", "fp16", 1, 1, 1, 3, 0, 8), 0, 0, "cpu")
    assert torch.equal(attention_float64(inputs, False), torch.zeros(1, 1, 3, 8, dtype=torch.float64))


def test_error_norms_are_relative() -> None:
    reference = torch.tensor([[3.0, -3.0], [0.3, -0.3]], dtype=torch.float64)
    result = reference.clone()
    result[1, 0] += 0.03
    norms = error_norms(result, reference)
    rms = reference.square().mean().sqrt().item()
    assert norms.max == pytest.approx(0.03 / rms)
    assert norms.rms == pytest.approx(0.015 / rms)
    assert norms.worst_row == pytest.approx(0.03 / 2**0.5 / 0.3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["pytorch_math", "pytorch_flash"])
def test_pytorch_backends_pass(dtype: str, name: str) -> None:
    assert verify(make_plan(name, dtype=dtype), emit=lambda event: None).passed
    backend = get(name, "attention")
    for hard in hard_inputs(dtype):
        if not hard.kind.startswith(("nan", "inf")):
            truth = find_truth(hard.case, hard.make(3, "cpu"))
            with backend.context():
                result = backend.prepare(hard.case, truth.inputs)()
            verdict = judge(truth, name, result, hard.kind)
            assert verdict.passed, f"{hard.kind}: {verdict.detail}"


def test_hard_inputs_are_asked_of_strict_implementations_only() -> None:
    plan = make_plan("cudadent42", "pytorch_flash")
    hard = [unit for unit in units(plan) if unit.hard is not None]
    assert {unit.implementation for unit in hard} == {"cudadent42"}
    assert len({unit.case.id for unit in hard}) == len(hard)
    assert "large_logits@small/bf16" in {unit.case.id for unit in hard}


def test_hard_values_at_the_largest_shape_in_reach() -> None:
    lengths = (16, 1024, 4096)
    cases = [
        AttentionCase(f"c{n}", "bf16", 1, 1, 1, n, n, 64, causal) for n in lengths for causal in (False, True)
    ]
    chunks = {hard.case.name.partition("@")[2] for hard in hard_cases(cases, "cpu")}
    assert chunks == {"c1024"}
    assert {hard.case.causal for hard in hard_cases(cases, "cpu")} == {False, True}


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_result_passes_every_hard_input(dtype: str) -> None:
    for hard in hard_inputs(dtype):
        truth = find_truth(hard.case, hard.make(3, "cpu"))
        verdict = judge(truth, "exact", right_to_rounding(truth.inputs, hard.case.causal), hard.kind)
        assert verdict.passed, f"{hard.kind}: {verdict.detail}"


# ---------------------------------------------------------------- wrong results

Damage = Callable[[AttentionInputs, bool], Tensor]


def scaled_wrongly(inputs: AttentionInputs, causal: bool) -> Tensor:
    return (attention_float64(inputs, causal) * 1.01).to(inputs.query.dtype)


def softmax_scale_off(inputs: AttentionInputs, causal: bool) -> Tensor:
    changed = AttentionInputs(inputs.query, inputs.key, inputs.value, inputs.scale * 1.01)
    return right_to_rounding(changed, causal)


def last_keys_skipped(inputs: AttentionInputs, causal: bool) -> Tensor:
    kept = inputs.key.shape[2] * 98 // 100
    return right_to_rounding(
        AttentionInputs(inputs.query, inputs.key[:, :, :kept], inputs.value[:, :, :kept]), False
    )


def one_row_wrong(inputs: AttentionInputs, causal: bool) -> Tensor:
    result = right_to_rounding(inputs, causal)
    result[0, 0, -1] *= 1.05
    return result


def one_row_stale(inputs: AttentionInputs, causal: bool) -> Tensor:
    result = right_to_rounding(inputs, causal)
    result[0, 0, -1] = result[0, 0, -2]
    return result


def one_entry_nan(inputs: AttentionInputs, causal: bool) -> Tensor:
    result = right_to_rounding(inputs, causal)
    result[0, 0, 7, 3] = float("nan")
    return result


def rows_swapped(inputs: AttentionInputs, causal: bool) -> Tensor:
    result = right_to_rounding(inputs, causal)
    result[0, 0, [10, 11]] = result[0, 0, [11, 10]]
    return result


DAMAGES = [
    scaled_wrongly,
    softmax_scale_off,
    one_row_wrong,
    one_row_stale,
    one_entry_nan,
    rows_swapped,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("damage", "causal"),
    [(damage, causal) for damage in DAMAGES for causal in (False, True)] + [(last_keys_skipped, False)],
)
def test_wrong_result_is_caught(damage: Damage, dtype: str, causal: bool) -> None:
    case = AttentionCase("long", dtype, 1, 1, 1, 64, 8192, 64, causal)
    truth = find_truth(case, random_inputs(case, 1, 0, "cpu"))
    assert judge(truth, "right", right_to_rounding(truth.inputs, causal), "random").passed
    verdict = judge(truth, "wrong", damage(truth.inputs, causal), "random")
    assert not verdict.passed
    assert verdict.detail


def test_nan_must_spread_and_must_not() -> None:
    hard = {item.kind: item for item in hard_inputs("bf16")}["nan_key_causal"]
    truth = find_truth(hard.case, hard.make(3, "cpu"))
    right = right_to_rounding(truth.inputs, True)
    assert bool(right.isnan().any())
    assert not judge(truth, "hides it", right.nan_to_num(0.0), hard.kind).passed
    everywhere = right.clone()
    everywhere[0, 0] = float("nan")
    assert not judge(truth, "spreads it", everywhere, hard.kind).passed


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda query: query[:, :, :-1], "shape"),
        (lambda query: query.float(), "float32"),
        (lambda query: [query], "list"),
        (lambda query: None, "NoneType"),
    ],
)
def test_wrong_form_is_named(result: Callable[[Tensor], Tensor], message: str) -> None:
    case = AttentionCase("c", "bf16", 1, 1, 1, 16, 16, 32)
    truth = find_truth(case, random_inputs(case, 1, 0, "cpu"))
    verdict = judge(truth, "odd", result(truth.inputs.query), "random")
    assert not verdict.passed
    assert message in verdict.detail


@pytest.mark.parametrize("seqlen", [32, 512, 4096])
def test_output_that_was_not_written_fails(seqlen: int) -> None:
    """Even where the right answer of an earlier call lies in the memory that is handed out next."""
    case = AttentionCase("c", "bf16", 1, 8, 8, seqlen, 64, 64)
    truth = find_truth(case, random_inputs(case, 1, 0, "cpu"))
    earlier = right_to_rounding(truth.inputs, False)
    del earlier
    query = truth.inputs.query
    verdict = judge(truth, "idle", poisoned_call(lambda: torch.empty_like(query), truth.inputs), "random")
    assert not verdict.passed


# ---------------------------------------------------------------- the stage


PLUG_INS = """
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

def attention(q, k, v, *, causal, softmax_scale):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1).float(), v.repeat_interleave(groups, 1).float()
    scores = q.float() @ k.transpose(-1, -2) * scale
    if causal:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~visible, -torch.inf)
    weights = torch.softmax(scores, -1)
    if causal:
        weights = weights.masked_fill(~visible, 0.0)
    return (weights @ v).to(q.dtype)

def wrong(q, k, v, *, causal, softmax_scale):
    return attention(q, k, v, causal=causal, softmax_scale=softmax_scale) * 1.02

def raises(q, k, v, *, causal, softmax_scale):
    raise ValueError("no such tile")

def short_only(q, k, v, *, causal, softmax_scale):
    if k.shape[2] != q.shape[2]:
        raise NotImplementedError("equal lengths only")
    return attention(q, k, v, causal=causal, softmax_scale=softmax_scale)

draws = []

def off_once(q, k, v, *, causal, softmax_scale):
    # A little over a bound on the values that it sees first.
    result = attention(q, k, v, causal=causal, softmax_scale=softmax_scale)
    draws.append(q)
    return a_little_off(result) if len(draws) == 1 else result

def a_little_off(result):
    if result.numel():
        result.view(-1)[0] += 0.05 * result.float().square().mean().sqrt()
    return result

def always_off(q, k, v, *, causal, softmax_scale):
    return a_little_off(attention(q, k, v, causal=causal, softmax_scale=softmax_scale))

def writes_inputs(q, k, v, *, causal, softmax_scale):
    result = attention(q, k, v, causal=causal, softmax_scale=softmax_scale)
    v.zero_()
    return result
"""


@pytest.fixture
def plug_ins(tmp_path: Path) -> Callable[[str], str]:
    file = tmp_path / "candidates.py"
    file.write_text(PLUG_INS)
    return lambda name: f"{file}:{name}"


def of(report: VerifyReport, implementation: str) -> list[VerifiedCase]:
    return [case for case in report.cases if case.implementation == implementation]


def test_right_plug_in_passes_and_wrong_ones_fail(plug_ins: Callable[[str], str]) -> None:
    names = [plug_ins(name) for name in ("attention", "wrong", "raises", "writes_inputs")]
    plan = make_plan(*names)
    report = verify(plan, emit=lambda event: None)
    right, wrong, raises, writes = (of(report, name) for name in names)
    judged_by_value = [case for case in right if not case.input.startswith(("nan", "inf"))]
    assert all(case.passed for case in judged_by_value), [c for c in judged_by_value if not c.passed]
    assert not next(case for case in wrong if case.input == "random").passed
    assert all(case.detail == "raised ValueError: no such tile" for case in raises)
    assert next(case for case in writes if case.input == "random").detail == "changed its inputs"
    barred = not_timed(plan, report)
    assert f"small/bf16/{names[1]}" in barred
    assert "small/bf16/pytorch" not in barred


def test_what_is_a_little_over_a_bound_is_decided_by_other_values(plug_ins: Callable[[str], str]) -> None:
    names = [plug_ins(name) for name in ("off_once", "always_off")]
    report = verify(make_plan(*names, dtype="bf16"), emit=lambda event: None)
    once, always = (next(case for case in of(report, name) if case.input == "random") for name in names)
    assert once.passed
    assert "within every bound on another draw of values; on the one before: max error" in once.detail
    assert not always.passed
    assert "and on the values before: max error" in always.detail


def test_unsupported_is_skipped_not_failed(plug_ins: Callable[[str], str]) -> None:
    name = plug_ins("short_only")
    report = verify(make_plan(name), emit=lambda event: None)
    assert report.skipped[f"odd_lengths/bf16/{name}"] == "equal lengths only"
    assert all(case.input not in ("odd_lengths", "one_key") for case in of(report, name))


def test_what_the_kernel_refuses_is_skipped_with_its_reason() -> None:
    plan = make_plan("cudadent42", cases=(AttentionCase("wide", "fp32", 1, 1, 1, 8, 8, 512),))
    report = verify(plan, emit=lambda event: None)
    assert "512" in report.skipped["wide/fp32/cudadent42"]
    assert all(case.passed for case in report.cases), [case for case in report.cases if not case.passed]
    assert "wide/fp32/cudadent42" in not_timed(plan, report)


def test_hard_failure_bars_the_dtype() -> None:
    plan = make_plan(cases=tuple(AttentionCase("c", dtype, 1, 1, 1, 8, 8, 8) for dtype in ("fp16", "bf16")))
    report = VerifyReport((failure("large_logits/bf16", "pytorch", "large_logits", "overflow"),))
    assert not_timed(plan, report) == {"c/bf16/pytorch": "failed verification on large_logits/bf16: overflow"}


def test_stage_resumes_where_it_is_told(plug_ins: Callable[[str], str]) -> None:
    plan = make_plan(plug_ins("attention"))  # plug-ins are asked for the adversarial inputs too
    events: list[Event] = []
    verify(plan, emit=events.append, start=3)
    expected = [(unit.case.id, unit.kind) for unit in units(plan)[3:]]
    verified = [(e.result.case, e.result.input) for e in events if isinstance(e, CaseVerified)]
    assert len(verified) > 5
    assert verified == expected


def test_inputs_depend_on_seed_case_and_index() -> None:
    case = AttentionCase("c", "fp32", 1, 1, 1, 4, 4, 8)
    first = random_inputs(case, 1, 0, "cpu").query
    assert torch.equal(first, random_inputs(case, 1, 0, "cpu").query)
    assert not torch.equal(first, random_inputs(case, 2, 0, "cpu").query)
    assert not torch.equal(first, random_inputs(case, 1, 1, "cpu").query)


def test_loaded_plug_in_is_called_with_the_scale(plug_ins: Callable[[str], str]) -> None:
    case = AttentionCase("c", "fp32", 1, 2, 2, 9, 9, 8)
    made = random_inputs(case, 1, 0, "cpu")
    inputs = AttentionInputs(made.query, made.key, made.value, softmax_scale=0.7)
    result = load(plug_ins("attention"), "attention").prepare(case, inputs)()
    torch.testing.assert_close(result.double(), attention_float64(inputs, False), rtol=1e-5, atol=1e-5)


def test_a_long_reference_shows_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cudadent42.correctness.truth.ALIVE_INTERVAL_S", 0.0)
    case = AttentionCase("c", "fp32", 2, 3, 3, 4, 4, 8)
    inputs = random_inputs(case, 1, 0, "cpu")
    events: list[Event] = []
    find_truth(case, inputs, heartbeat(events.append))
    assert events == [Alive()] * 6  # a chunk per batch and head
