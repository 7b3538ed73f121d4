"""A result may be quoted only by the decision tree of docs/defences.md."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cudadent42.decisions.claims import claim, quotable, with_claim
from cudadent42.model.integrity import Breach, Confirmation, Finding, Grade, Integrity, Way
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
