from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.errors import ExitCode, UsageError
from cudadent42.stages.gates import Decision, Evidence, GateReport, Measured, evaluate, report_lines
from cudadent42.stages.gates.loader import parse


def ratio(value: float, half: float, blocks: int = 25) -> Measured:
    return Measured(value, value - half, value + half, blocks)


def judged(body: str, evidence: Evidence) -> GateReport:
    return evaluate(parse(f'[[gate]]\nname = "g"\n{body}', "file"), evidence)


def speedup(body: str, measured: Measured) -> Decision:
    return judged(f'metric = "speedup"\n{body}', Evidence({"speedup": measured})).decision


@pytest.mark.parametrize(
    ("value", "half", "decision"),
    [(1.6, 0.05, Decision.PASSED), (1.4, 0.05, Decision.FAILED), (1.5, 0.05, Decision.UNDECIDED)],
)
def test_an_interval_that_spans_the_threshold_cannot_tell(
    value: float, half: float, decision: Decision
) -> None:
    assert speedup('at_least = "1.5x"', ratio(value, half)) is decision


@pytest.mark.parametrize(
    ("value", "half", "decision"),
    [
        (0.10, 0.005, Decision.PASSED),
        (0.13, 0.005, Decision.FAILED),
        (0.05, 0.005, Decision.FAILED),
        (0.11, 0.005, Decision.UNDECIDED),
        (0.10, 0.05, Decision.UNDECIDED),
    ],
)
def test_within_ten_percent_of_a_tenth(value: float, half: float, decision: Decision) -> None:
    assert speedup('within = "10 %"\nof = 0.10', ratio(value, half)) is decision


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 1))
def test_opposite_gates_are_never_both_passed_or_both_failed(
    value: float, threshold: float, half: float
) -> None:
    up = speedup(f"above = {threshold!r}", ratio(value, half))
    down = speedup(f"at_most = {threshold!r}", ratio(value, half))
    opposite = {Decision.PASSED: Decision.FAILED, Decision.FAILED: Decision.PASSED}
    if half > 0:
        assert (
            {up, down} == {Decision.UNDECIDED}
            or up is opposite.get(down)
            or value
            in (
                threshold - half,
                threshold + half,
            )
        )
    else:
        assert up is opposite[down]


def test_exact_metrics_pass_or_fail() -> None:
    evidence = Evidence().with_metrics({"bank_conflicts": 0.051})
    report = judged('metric = "bank_conflicts"\nbelow = "5 %"', evidence)
    assert (report.decision, report.exit_code) == (Decision.FAILED, ExitCode.GATE_FAILED)
    assert judged('metric = "bank_conflicts"\nbelow = "5.2 %"', evidence).passed
    assert not judged('metric = "bank_conflicts"\nbelow = "5.1 %"', evidence).passed


def test_too_few_blocks_decide_nothing() -> None:
    assert speedup("at_least = 1", ratio(2.0, 0.1, blocks=5)) is Decision.UNDECIDED


def test_a_gate_that_cannot_tell_is_not_passed() -> None:
    report = judged('metric = "speedup"\nat_least = 1', Evidence({"speedup": ratio(1.0, 0.02)}))
    assert not report.passed
    assert report.exit_code == ExitCode.GATE_UNDECIDED == 6


def cases(**slowdowns: Measured) -> Evidence:
    return Evidence({}, {"slowdown": {f"{name}/bf16": value for name, value in slowdowns.items()}})


NO_CASE_SLOWER = 'metric = "slowdown"\ncases = "every"\nat_most = "3 %"'


def test_no_case_slower_by_more_than_three_percent() -> None:
    good, bad, unclear = ratio(0.0, 0.01), ratio(0.05, 0.01), ratio(0.03, 0.01)
    assert judged(NO_CASE_SLOWER, cases(a=good, b=good)).passed
    failed = judged(NO_CASE_SLOWER, cases(a=good, b=bad, c=unclear))
    assert failed.decision is Decision.FAILED
    assert (
        "slowdown of b/bf16 is 5.0 % (4.0 % to 6.0 %), wanted at most 3.0 %, 2.0 % off"
        in report_lines(failed)[0]
    )
    assert "can tell" in report_lines(failed)[0]
    assert "c/bf16" in report_lines(failed)[1]
    assert judged(NO_CASE_SLOWER, cases(a=good, c=unclear)).decision is Decision.UNDECIDED


def test_what_would_help_is_said() -> None:
    """The value is one half-width from the threshold already in half of all repetitions; four times out of five takes
    2.8 standard errors there instead of 1.96: with half the width (4 x 2.04 =) 8.2 times the 25 blocks."""
    line = report_lines(judged(NO_CASE_SLOWER, cases(a=ratio(0.02, 0.02))))[0]
    assert "cannot tell" in line
    assert "about 205 blocks would settle it four times out of five (now 25)" in line
    line = report_lines(judged(NO_CASE_SLOWER, cases(a=ratio(0.03, 0.02))))[0]
    assert "lies on the threshold" in line


def test_named_cases() -> None:
    evidence = cases(a=ratio(0.0, 0.01), b=ratio(0.2, 0.01))
    assert judged('metric = "slowdown"\ncases = ["a"]\nat_most = 0.03', evidence).passed
    assert not judged('metric = "slowdown"\ncases = ["b/bf16"]\nat_most = 0.03', evidence).passed
    with pytest.raises(UsageError, match="no case 'c'"):
        judged('metric = "slowdown"\ncases = ["c"]\nat_most = 0.03', evidence)


def test_a_case_without_a_value_is_undecided() -> None:
    report = judged(NO_CASE_SLOWER, cases(a=Measured(math.nan, reason="not timed: it crashed")))
    assert report.decision is Decision.UNDECIDED
    assert "not timed: it crashed" in report_lines(report)[0]


def test_unknown_metrics_are_named_with_their_neighbours() -> None:
    with pytest.raises(UsageError, match=r"unknown metric 'spedup'.*did you mean 'speedup'"):
        judged('metric = "spedup"\nat_least = 1', Evidence({"speedup": ratio(1, 0.1)}))
    with pytest.raises(UsageError, match='add cases = "every"'):
        judged('metric = "latency_ms"\nat_most = 1', Evidence())


def test_what_the_control_adds_does_not_shrink_with_blocks() -> None:
    """By hand: of 2 % to go the control has 1 %; the blocks' own 2 % must become the other, with room."""
    wide = Measured(0.02, -0.02, 0.05, 25, from_blocks=(0.0, 0.04))
    line = report_lines(judged('metric = "slowdown"\ncases = "every"\nat_most = "4 %"', cases(a=wide)))[0]
    assert "about 205 blocks would settle it four times out of five (now 25)" in line
    line = report_lines(judged(NO_CASE_SLOWER, cases(a=wide)))[0]
    assert "more blocks may not mend; measure on a quieter machine" in line


@given(st.floats(-0.5, 0.5), st.floats(0.001, 0.2), st.floats(0.001, 0.2), st.floats(0, 0.2))
def test_the_advised_blocks_would_settle_it(value: float, below: float, above: float, added: float) -> None:
    """With the advised blocks, the same value and control, the gate is no longer undecided."""
    body = 'metric = "slowdown"\ncases = "every"\nat_most = 0'

    def with_blocks(blocks: int) -> Measured:
        shrunk = math.sqrt(25 / blocks)
        low, high = value - below * shrunk, value + above * shrunk
        return Measured(value, low - added, high + added, blocks, from_blocks=(low, high))

    (line,) = report_lines(judged(body, cases(a=with_blocks(25))))
    advised = re.search(r"about (\d+) blocks", line)
    if advised is not None:
        report = judged(body, cases(a=with_blocks(int(advised[1]) + 1)))
        assert report.decision is not Decision.UNDECIDED
    elif "cannot tell" in line:
        assert abs(value) <= added or "on the threshold" in line


@pytest.mark.parametrize("true", [0.02, 0.045])
def test_the_advised_blocks_settle_it_four_times_out_of_five(true: float) -> None:
    """A gate at 3 %, and a value that is known as 25 blocks leave it: repetitions with the advised number, each with
    its own chance, are decided, and rightly, in about 80 %."""
    spread = 0.05

    def measured(value: float, blocks: int) -> Measured:
        return ratio(value, 1.96 * spread / math.sqrt(blocks), blocks)

    line = report_lines(judged(NO_CASE_SLOWER, cases(a=measured(true, 25))))[0]
    advised = re.search(r"about (\d+) blocks", line)
    assert advised is not None
    blocks = int(advised[1])
    random = np.random.default_rng(7)
    values = random.normal(true, spread / math.sqrt(blocks), 2000)
    right = Decision.PASSED if true < 0.03 else Decision.FAILED
    right_ones = sum(judged(NO_CASE_SLOWER, cases(a=measured(v, blocks))).decision is right for v in values)
    assert 0.76 <= right_ones / len(values) <= 0.84


def test_a_profile_that_is_not_there_or_lacks_a_metric_is_undecided_and_a_misspelt_one_an_error() -> None:
    body = 'metric = "profile.bank_conflicts"\nbelow = "5 %"'
    assert "has no profile" in report_lines(judged(body, Evidence()))[0]
    profiled = Evidence().with_metrics({"profile.roof_share": 0.1})
    report = judged(body, profiled)
    assert report.decision is Decision.UNDECIDED
    assert "the run folder's profile does not have it" in report_lines(report)[0]
    assert "wanted below 5.0 %" in report_lines(report)[0]
    for evidence in (Evidence(), profiled):
        with pytest.raises(UsageError, match=r"no metric 'bank_conflict'.*did you mean 'bank_conflicts'"):
            judged(body.replace("conflicts", "conflict"), evidence)


def test_words() -> None:
    evidence = Evidence({"verification": Measured("failed"), "verdict": Measured("undecided")})
    assert judged('metric = "verification"\nis = "passed"', evidence).decision is Decision.FAILED
    assert judged('metric = "verification"\nis_not = "passed"', evidence).passed
    assert judged('metric = "verdict"\nis_not = "slower"', evidence).decision is Decision.UNDECIDED
    assert judged('metric = "verdict"\nis = "undecided"', evidence).passed
    with pytest.raises(UsageError, match="is a word"):
        judged('metric = "verification"\nat_least = 1', evidence)
    with pytest.raises(UsageError, match="is a number"):
        judged('metric = "x"\nis = "passed"', Evidence().with_metrics({"x": 1.0}))


def test_warnings_do_not_count_and_stop_ends_a_session() -> None:
    evidence = Evidence({"speedup": ratio(0.4, 0.01)})
    warned = judged('metric = "speedup"\nat_least = 0.5\non_failure = "warn"', evidence)
    assert warned.passed
    assert report_lines(warned)[0].startswith("warning")
    stopped = judged('metric = "speedup"\nat_least = 0.5\non_failure = "stop"', evidence)
    assert stopped.stopped_by
    assert stopped.exit_code is ExitCode.GATE_FAILED
    assert not judged('metric = "speedup"\nat_least = 0.5', evidence).stopped_by
