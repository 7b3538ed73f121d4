"""Gates against run folders, as files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.model.records import (
    Comparison,
    MachineReport,
    Plan,
    Results,
    Verdict,
    VerifiedCase,
    VerifyReport,
)
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.patterns.evidence import of_results
from cudadent42.runs.run_folder import RunWriter
from cudadent42.stages import gates
from cudadent42.stages.gates.loader import parse

CASES = tuple(AttentionCase(name, "bf16", 1, 1, 1, 64, 64, 64) for name in ("a", "b"))
PLAN = Plan("test", "cpu", CASES, "pytorch", ("pytorch", "mine"), 25, 1, seed=3, margin=0.02)


def comparison(name: str, speedup: float, implementation: str = "mine") -> Comparison:
    return Comparison(
        name,
        "bf16",
        implementation,
        "pytorch",
        speedup,
        speedup - 0.01,
        speedup + 0.01,
        Verdict.EQUAL,
        1.0,
        1.0,
        25,
    )


def results(cases: tuple[Comparison, ...], control: float = 1.0) -> Results:
    return Results(
        *("pytorch", "mine", 1.2, 1.19, 1.21, Verdict.FASTER, 0.02, abs(control - 1)),
        cases=cases,
        control=tuple(comparison(case.name, control, "pytorch_control") for case in CASES),
        skipped={} if len(cases) == 2 else {"b/bf16/mine": "it raised"},
    )


def folder(path: Path, outcome: Results | None, passed: bool = True) -> Path:
    with RunWriter(path, PLAN, MachineReport((), "", {}), None, ()) as writer:
        writer.write_verify(
            VerifyReport((VerifiedCase("a/bf16", "mine", "random", None, None, None, passed),))
        )
        if outcome is not None:
            writer.write_results(outcome)
    return path


BOTH = (comparison("a", 1.5), comparison("b", 0.98))


def test_default_gates_of_a_run_folder(tmp_path: Path) -> None:
    report = gates.judge(gates.load("default"), folder(tmp_path / "run", results(BOTH)))
    assert report.decision is gates.Decision.UNDECIDED  # b: 2 % slower, 1.0 to 3.1
    written = json.loads((tmp_path / "run" / "gates.json").read_text())
    assert next(iter(written)) == "schema_version"
    assert (written["decision"], written["exit_code"]) == ("undecided", 6)
    again = gates.read_report(tmp_path / "run")
    assert again is not None
    assert (gates.report_lines(again), again.exit_code) == (gates.report_lines(report), report.exit_code)


def test_what_the_control_shows_beyond_the_margin_widens_the_interval(tmp_path: Path) -> None:
    quiet = gates.evidence_of(folder(tmp_path / "quiet", results(BOTH, 1.01))).cases["speedup"]["a/bf16"]
    noisy = gates.evidence_of(folder(tmp_path / "noisy", results(BOTH, 1.06))).cases["speedup"]["a/bf16"]
    assert (quiet.low, quiet.high) == pytest.approx((1.49, 1.51))
    assert (noisy.low, noisy.high) == pytest.approx((1.49 / 1.04, 1.51 * 1.04))


def test_the_flagged_share_is_of_all_blocks_also_of_those_left_out(tmp_path: Path) -> None:
    a, b = (replace(row, blocks=20, flagged_blocks=5, left_out=5) for row in BOTH)
    evidence = gates.evidence_of(folder(tmp_path / "run", results((a, b))))
    assert evidence.overall["flagged_share"].value == evidence.cases["flagged_share"]["a/bf16"].value == 0.2
    assert of_results(results((a, b))).metrics["flagged_fraction"] == 0.2


def test_a_case_that_was_not_timed_is_not_forgotten(tmp_path: Path) -> None:
    report = gates.judge(gates.load("default"), folder(tmp_path / "run", results(BOTH[:1])))
    assert report.decision is gates.Decision.UNDECIDED
    assert any("b/bf16" in line and "it raised" in line for line in gates.report_lines(report))
    assert any(line.startswith("warning") and "not_timed is 1" in line for line in gates.report_lines(report))


def test_failed_verification_fails_the_gate(tmp_path: Path) -> None:
    report = gates.judge(gates.load("default"), folder(tmp_path / "run", results(BOTH), passed=False))
    assert report.decision is gates.Decision.FAILED
    assert report.stopped_by


def test_a_run_without_results_is_undecided(tmp_path: Path) -> None:
    report = gates.judge(gates.load("improvement"), folder(tmp_path / "run", None))
    assert report.decision is gates.Decision.UNDECIDED


def test_profile_metrics(tmp_path: Path) -> None:
    path = folder(tmp_path / "run", results(BOTH))
    (path / "profile.json").write_text(
        '{"schema_version": 1, "metrics": {"bank_conflicts": 0.08, "occupancy": 0.6}}'
    )
    report = gates.judge(gates.load("profile"), path)
    assert report.decision is gates.Decision.FAILED
    assert "wanted below 5.0 %" in gates.report_lines(report)[0]
    (path / "profile.json").write_text("[]")
    with pytest.raises(UsageError, match=r"profile.json cannot be read"):
        gates.evidence_of(path)


def test_gates_are_checked_before_the_run() -> None:
    gates.check(gates.load("default"), PLAN)
    gates.check(gates.load("profile"), PLAN)
    with pytest.raises(UsageError, match="unknown metric"):
        gates.check(parse('[[gate]]\nname = "g"\nmetric = "speed"\nat_least = 1', "f"), PLAN)
    with pytest.raises(UsageError, match="no case 'c'"):
        gates.check(parse('[[gate]]\nname = "g"\nmetric = "speedup"\ncases = ["c"]\nat_least = 1', "f"), PLAN)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('metric = "verdict"\nis_not = "slwoer"', "never 'slwoer'.*did you mean 'slower'"),
        ('metric = "verification"\nis = "ok"', "one of passed, failed"),
        ('metric = "verdict"\nat_least = 1', "is a word"),
        ('metric = "speedup"\nis = "faster"', "is a number"),
        ('metric = "speedup"\ncases = "every"\nis = "faster"', "is a number"),
    ],
)
def test_a_threshold_that_does_not_suit_its_metric_is_found_before_the_run(body: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        gates.check(parse(f'[[gate]]\nname = "g"\n{body}', "f"), PLAN)


def test_a_report_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gates.json").write_text('{"schema_version": 99}')
    with pytest.raises(UsageError, match="newer"):
        gates.read_report(tmp_path)
    assert gates.read_report(tmp_path / "none") is None
