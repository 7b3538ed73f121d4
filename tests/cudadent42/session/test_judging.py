"""What only the session knows, with its interval, held against real gates and run folders."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import quick
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.runs.run_folder import RESULTS
from cudadent42.session.desk import ended_of
from cudadent42.session.events import Decision, WorkOutcome
from cudadent42.session.judging import improvement
from cudadent42.session.state import RunRecord
from cudadent42.session.workshop import IMPROVEMENT, Lab, SessionMetric

GATES = '[[gate]]\nname = "no regression"\nmetric = "session.improvement"\nat_least = 0.97\n'


def run(name: str, speedup: float | None, share: float = 0.0) -> RunRecord:
    """A run whose speed-up is known to this share."""
    if speedup is None:
        return RunRecord("validate", name, None, "", WorkOutcome.FAILED)
    ends = (speedup / (1 + share), speedup * (1 + share))
    return RunRecord(
        "validate", name, None, "", WorkOutcome.FINISHED, speedup=speedup, ci_low=ends[0], ci_high=ends[1]
    )


def test_the_errors_of_both_runs_add_up() -> None:
    """By hand: 3 % and 4 % apart are 5 % together, as logarithms."""
    metric = improvement(run("b", 2.0, math.expm1(0.03)), run("a", 1.0, math.expm1(0.04)))
    assert metric.value == pytest.approx(2.0)
    assert (metric.low, metric.high) == pytest.approx((2 * math.exp(-0.05), 2 * math.exp(0.05)))
    assert metric.from_run == pytest.approx((2 * math.exp(-0.03), 2 * math.exp(0.03)))


@given(st.floats(0, 0.5), st.floats(0, 0.5))
def test_what_the_controls_show_beyond_the_margin_widens_the_interval(one: float, other: float) -> None:
    """As it does that of a single run, for each of the two; more blocks do not mend it."""
    b, a = run("b", 2.0, 0.03), run("a", 1.0, 0.04)
    quiet = improvement(b, a)
    metric = improvement(replace(b, control_excess=one), replace(a, control_excess=other))
    wider = (1 + one) * (1 + other)
    assert (metric.low, metric.high) == pytest.approx((quiet.low / wider, quiet.high * wider))
    assert (metric.value, metric.from_run) == (quiet.value, quiet.from_run)


def test_runs_of_the_same_code_are_called_a_regression_no_more_often_than_one_run_is_called_slow() -> None:
    """On a machine where two copies of one kernel differ by 4 % for good, as the controls show too. A gate at 0.97
    fails on unchanged code in a quarter of all sessions by the errors of the blocks alone; where what the controls show
    counts, it does no more often than the gate "at most 3 % slower" of a single run."""
    random = np.random.default_rng(5)
    trials, copies, margin, error = 4000, 0.04, 0.01, 0.003
    failed = {"blocks alone": 0, "with controls": 0, "one run": 0}
    for _ in range(trials):
        sides = []
        for name in "ba":
            shown = math.exp(random.normal(0, copies) + random.normal(0, error))
            excess = max(0.0, abs(math.exp(random.normal(0, copies)) - 1) - margin)
            sides.append(replace(run(name, shown, math.expm1(1.96 * error)), control_excess=excess))
        later, baseline = sides
        bare = improvement(replace(later, control_excess=0.0), replace(baseline, control_excess=0.0))
        failed["blocks alone"] += bare.high < 0.97
        failed["with controls"] += improvement(later, baseline).high < 0.97
        failed["one run"] += (later.ci_high or 0) * (1 + later.control_excess) < 1 / 1.03
    shares = {name: count / trials for name, count in failed.items()}
    assert shares["blocks alone"] > 0.22
    assert shares["with controls"] < 0.12
    assert shares["with controls"] < shares["one run"] + 0.02


def test_a_runs_control_is_on_record(tmp_path: Path) -> None:
    """The excess of the real comparison of a run folder reaches the session's event."""
    quick.QuickWorkshop()._run(tmp_path / "run", quick.Quiet())
    written = json.loads((tmp_path / "run" / RESULTS).read_text())
    control = {**written["cases"][0], "speedup": 1.05 + written["margin"], "implementation": "control"}
    (tmp_path / "run" / RESULTS).write_text(json.dumps({**written, "control": [control]}))
    assert ended_of(tmp_path / "run", None).control_excess == pytest.approx(0.05)


def test_what_is_not_known_has_no_value() -> None:
    for one, other in ((None, run("a", 1.0)), (run("b", None), run("a", 1.0)), (run("b", 1.0), None)):
        assert math.isnan(improvement(one, other).value)
    baseline = run("a", 1.5, 0.1)
    assert improvement(baseline, baseline) == SessionMetric(1.0)  # exactly itself


@pytest.mark.parametrize(
    ("value", "half", "decision"),
    [(1.0, 0.02, Decision.PASSED), (1.0, 0.05, Decision.UNDECIDED), (0.9, 0.05, Decision.FAILED)],
)
def test_a_session_that_cannot_tell_says_so(
    tmp_path: Path, value: float, half: float, decision: Decision, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluating = importlib.import_module(
        "cudadent42.stages.gates.evaluate"
    )  # a function of its package has its name
    monkeypatch.setattr(evaluating, "MIN_BLOCKS", 3)  # of the quick workshop's runs
    quick.QuickWorkshop()._run(tmp_path / "run", quick.Quiet())
    (tmp_path / "gates.toml").write_text(GATES)
    metric = SessionMetric(value, value - half, value + half)
    judgement = Lab(("test",), lambda folder: None).judge(
        tmp_path / "gates.toml", tmp_path / "run", {IMPROVEMENT: metric}
    )
    assert judgement.decision is decision
    assert "wanted at least 0.970×" in judgement.lines[0]
