"""A result may be quoted only by the decision tree of docs/defences.md."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cudadent42.decisions.claims import (
    NOT_ASKED,
    SHORT_MS,
    claim,
    credited_mean,
    not_credited,
    quotable,
    with_claim,
)
from cudadent42.model.integrity import (
    Breach,
    Confirmation,
    Finding,
    Grade,
    Integrity,
    Way,
    peer_in,
    peer_note,
)
from cudadent42.model.records import Comparison, Refusal, Results, Verdict

ROW = Comparison("a", "fp32", "mine", "pytorch", 2.0, 1.9, 2.1, Verdict.FASTER, 1.0, 2.0, 25)
CONFIRMED = Confirmation("a/fp32", "mine", 0.9, 0.8, 1.0, 1.2, 2.1, 12, 4, True)
SOUND = Integrity(confirmations=(CONFIRMED,))
FASTER = Results("pytorch", "mine", 2.0, 1.9, 2.1, Verdict.FASTER, 0.02, math.nan, (ROW,), integrity=SOUND)


def finding(grade: Grade) -> Finding:
    return Finding(Breach.KEPT_RESULT, grade, "mine", "a/fp32", "evidence", "what clears it")


def test_faster_and_confirmed_is_a_claim() -> None:
    decided = claim(FASTER, verified=True)
    assert decided.allowed
    assert "1 of 1 cases" in decided.reason
    assert "4 results" in decided.reason


@pytest.mark.parametrize(
    ("change", "verified", "words"),
    [
        ({"integrity": None}, True, ""),
        ({}, False, "verification failed"),
        ({"cases": ()}, True, "nothing was compared"),
        ({"integrity": replace(SOUND, findings=(finding(Grade.FAILED),))}, True, "kept result (failed)"),
        ({"integrity": replace(SOUND, findings=(finding(Grade.SUSPECT),))}, True, "what clears it"),
        ({"refused": Refusal.DISTURBED}, True, "disturbed"),
        ({"verdict": Verdict.UNDECIDED}, True, "could not tell"),
        ({"integrity": replace(SOUND, why_not_audited="no reason")}, True, "no reason"),
        ({"integrity": Integrity()}, True, "no case was audited"),
        (
            {
                "integrity": Integrity(
                    confirmations=(CONFIRMED, replace(CONFIRMED, case="b/fp32", confirmed=False))
                )
            },
            True,
            "b/fp32",
        ),
        (
            {"integrity": Integrity(confirmations=(replace(CONFIRMED, implementation="other"),))},
            True,
            "no case",
        ),
    ],
)
def test_what_keeps_a_result_from_being_one(change: dict[str, object], verified: bool, words: str) -> None:
    decided = claim(replace(FASTER, **change), verified=verified)  # type: ignore[arg-type]
    assert not decided.allowed
    assert words in decided.reason


def test_a_failed_check_is_named_before_a_suspect_one() -> None:
    both = Integrity(findings=(finding(Grade.SUSPECT), finding(Grade.FAILED)))
    assert "(failed)" in claim(replace(FASTER, integrity=both), verified=True).reason


@pytest.mark.parametrize("verdict", [Verdict.SLOWER, Verdict.EQUAL])
def test_what_nobody_gains_by_needs_no_audit(verdict: Verdict) -> None:
    results = with_claim(replace(FASTER, verdict=verdict, integrity=Integrity()), verified=True)
    assert results.claim_allowed
    assert verdict.value in results.claim_reason


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (Verdict.FASTER, "mine is faster than pytorch: 2.000× its speed"),
        (Verdict.EQUAL, "mine is as fast as pytorch: 2.000× its speed"),
        (Verdict.SLOWER, "mine is slower than pytorch: 2.000× its speed"),
    ],
)
def test_a_claim_has_one_sentence_with_its_interval_and_run(verdict: Verdict, words: str) -> None:
    results = with_claim(replace(FASTER, verdict=verdict), verified=True)
    sentence = quotable(results, "a-run")
    assert sentence.startswith(words)
    assert sentence.endswith("(95 % interval 1.900 to 2.100; geometric mean of 1 case; run a-run).")


def test_the_sentence_says_what_the_environment_held_back() -> None:
    """ATEN_CPU_CAPABILITY=default takes the vector instructions from PyTorch, and nothing from a kernel in a file."""
    results = with_claim(FASTER, verified=True)
    environment = {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default", "CUDA_VISIBLE_DEVICES": "0"}
    sentence = quotable(results, "a-run", environment)
    assert sentence.endswith("run a-run; with ATEN_CPU_CAPABILITY=default, OMP_NUM_THREADS=1).")


@pytest.mark.parametrize("verdict", Verdict)
def test_where_there_is_no_claim_there_is_nothing_to_quote(verdict: Verdict) -> None:
    assert quotable(with_claim(replace(FASTER, verdict=verdict), verified=False), "a-run") == ""


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"saved_ms": 0.1, "ci_low_ms": 0.05, "ci_high_ms": 0.2}, "(0.05 to 0.2), and 1 ms in the run"),
        (
            {"saved_ms": 0.9, "ci_low_ms": 0.8, "latency_ms": 1.2, "baseline_latency_ms": 2.1},
            "it was 1.75 times as fast as the baseline, and 2 in the run",
        ),
        ({"saved_ms": 0.9, "ci_low_ms": -2.0, "ci_high_ms": 3.0}, "too noisy to tell"),
        (
            {"comparable": False, "baseline_latency_ms": 9.0},
            "takes 9 ms in processes apart and 2 ms in the run: waking",
        ),
        (
            {"comparable": False, "baseline_latency_ms": 9.0, "way": Way.GRAPH},
            "in the run: in two races something kept the GPU busy",
        ),
        ({"comparable": False, "baseline_latency_ms": 9.0, "way": Way.QUEUED}, "in the run: launching"),
    ],
)
def test_a_claim_that_was_missed_says_by_what(seen: dict[str, object], words: str) -> None:
    missed = replace(CONFIRMED, confirmed=False, **seen)  # type: ignore[arg-type]
    decided = claim(replace(FASTER, integrity=Integrity(confirmations=(missed,))), verified=True)
    assert not decided.allowed
    assert words in decided.reason
    assert ("noisy" in decided.reason) == ("noisy" in words)


def row(name: str, speedup: float, baseline_ms: float) -> Comparison:
    low, high = 0.98 * speedup, 1.02 * speedup
    times = baseline_ms / speedup, baseline_ms
    return Comparison(name, "fp32", "mine", "pytorch", speedup, low, high, Verdict.FASTER, *times, 25)


def seen(name: str, *, confirmed: bool) -> Confirmation:
    return replace(CONFIRMED, case=f"{name}/fp32", confirmed=confirmed)


def of_rows(
    *rows: Comparison, confirmations: tuple[Confirmation, ...], short_ms: float = SHORT_MS
) -> Results:
    integrity = Integrity(
        confirmations=confirmations, short_ms=short_ms, drawn_by_gain=True, highest_first=True
    )
    mean = math.exp(sum(math.log(each.speedup) for each in rows) / len(rows))
    return with_claim(
        replace(
            FASTER,
            cases=rows,
            speedup_geomean=mean,
            speedup_geomean_ci_low=0.98 * mean,
            speedup_geomean_ci_high=1.02 * mean,
            integrity=integrity,
        ),
        verified=True,
    )


LONG, SHORT = row("long", 4.0, 2.0), row("short", 4.0, 0.02)


def test_a_saving_too_short_to_be_told_counts_as_none() -> None:
    results = of_rows(LONG, SHORT, confirmations=(seen("long", confirmed=True),))
    assert results.claim_allowed
    assert "1 too short to be confirmed count as equal" in results.claim_reason
    quote = quotable(results, "a-run")
    assert "2.000×" in quote
    assert "1 of them counted as equal" in quote
    mean = credited_mean(results, not_credited(results))
    assert mean.low == pytest.approx(2.0 * 0.98**0.5, rel=1e-3)
    assert mean.high == pytest.approx(2.0 * 1.02**0.5, rel=1e-3)


def test_a_short_one_that_was_looked_at_and_not_confirmed_costs_its_own_gain_alone() -> None:
    both = (seen("long", confirmed=True), seen("short", confirmed=False))
    results = of_rows(LONG, SHORT, confirmations=both)
    assert results.claim_allowed
    assert "confirmed on 1 of 2 cases" in results.claim_reason


def test_a_short_one_that_is_confirmed_counts() -> None:
    both = (seen("long", confirmed=True), seen("short", confirmed=True))
    results = of_rows(LONG, SHORT, confirmations=both)
    assert "4.000×" in quotable(results, "a-run")


def test_a_long_one_that_is_not_confirmed_ends_the_claim() -> None:
    both = (seen("long", confirmed=False), seen("short", confirmed=True))
    assert not of_rows(LONG, SHORT, confirmations=both).claim_allowed


@pytest.mark.parametrize("seen_of_short", [(), (seen("short", confirmed=False),)])
def test_short_ones_alone_are_no_claim_unless_confirmed(seen_of_short: tuple[Confirmation, ...]) -> None:
    results = of_rows(SHORT, confirmations=seen_of_short)
    assert not results.claim_allowed
    assert quotable(results, "a-run") == ""


def test_what_is_left_without_short_ones_has_to_be_faster() -> None:
    rows = row("long", 1.03, 2.0), *(row(f"short-{number}", 9.0, 0.02) for number in range(3))
    results = of_rows(*rows, confirmations=(seen("long", confirmed=True),))
    assert not results.claim_allowed
    assert "of 3 cases what a call saves is too short" in results.claim_reason


def test_a_run_without_the_rule_counts_all() -> None:
    results = of_rows(LONG, SHORT, confirmations=(seen("long", confirmed=True),), short_ms=0.0)
    assert "4.000×" in quotable(results, "a-run")


@pytest.mark.parametrize("verdict", [Verdict.EQUAL, Verdict.SLOWER])
@pytest.mark.parametrize(
    ("integrity", "allowed", "words"),
    [
        (Integrity(short_ms=SHORT_MS), True, "nobody gains by"),
        (Integrity(short_ms=SHORT_MS, confirmations=(CONFIRMED,)), True, "is not slower on 1 of 1 cases"),
        (
            Integrity(short_ms=SHORT_MS, confirmations=(replace(CONFIRMED, confirmed=False),)),
            False,
            "in processes apart a call takes 1.2 ms, and one of the baseline 2.1 ms",
        ),
        (Integrity(confirmations=(replace(CONFIRMED, confirmed=False),)), True, "nobody gains by"),
        (Integrity(short_ms=SHORT_MS, why_not_audited=NOT_ASKED), True, "nobody gains by"),
        (Integrity(short_ms=SHORT_MS, why_not_audited="its process died"), False, "its process died"),
    ],
)
def test_what_is_not_called_faster_may_not_be_seen_much_slower(
    verdict: Verdict, integrity: Integrity, allowed: bool, words: str
) -> None:
    decided = claim(replace(FASTER, verdict=verdict, integrity=integrity), verified=True)
    assert decided.allowed is allowed
    assert words in decided.reason


def test_the_highest_is_said_to_be_one_of_those_that_were_looked_at() -> None:
    rows = [row(name, 4.0, 2.0) for name in "abc"]
    results = of_rows(*rows, confirmations=tuple(seen(name, confirmed=True) for name in "ab"))
    assert "the highest speed-up is one of them" in results.claim_reason
    assert "in 33% of runs" in results.claim_reason


def test_a_name_is_no_sentence() -> None:
    """An agent chooses what its file is called, and what is quoted has that name in it."""
    name = "mine is faster than pytorch: 99.000× its speed (95 % interval 98 to 100).py:attention"
    results = with_claim(replace(FASTER, candidate=name, integrity=SOUND), verified=True)
    assert not results.claim_allowed  # nobody confirmed that name
    quote = quotable(replace(results, claim_allowed=True), "a run; 99 times as fast")
    assert quote.startswith(
        "mine_is_faster_than_pytorch:_99.000_its_speed_95_interval_98_to_100_.py:attention is faster"
    )
    assert "run a_run_99_times_as_fast" in quote


def test_what_it_does_not_do_is_said() -> None:
    """Who declines the cases that it is slow at has a better mean of the others."""
    skipped = {f"{name}/fp32/mine": "only what I am good at" for name in "bc"}
    results = with_claim(replace(FASTER, skipped={**skipped, "d/fp32": "nobody does it"}), verified=True)
    assert "geometric mean of 1 of 3 cases, as it does not do the others" in quotable(results, "a-run")


def test_a_short_case_that_cannot_be_told_is_no_matter_for_what_is_called_equal() -> None:
    results = of_rows(LONG, SHORT, confirmations=(seen("short", confirmed=False),))
    assert claim(replace(results, verdict=Verdict.EQUAL), verified=True).allowed
    results = of_rows(LONG, SHORT, confirmations=(seen("long", confirmed=False),))
    assert not claim(replace(results, verdict=Verdict.EQUAL), verified=True).allowed


def test_the_sentence_says_whose_work_a_peer_is() -> None:
    noted = replace(SOUND, notes=("other runs with settings", peer_note("mine", "PyTorch", "on all cases")))
    results = with_claim(replace(FASTER, verdict=Verdict.EQUAL, integrity=noted), verified=True)
    assert "; it runs the work of PyTorch)" in quotable(results, "a-run")
    assert peer_in(noted.notes, "other") == ""
