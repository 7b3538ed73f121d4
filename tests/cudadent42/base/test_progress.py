from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from cudadent42.base import progress
from cudadent42.commands import tables
from cudadent42.model.records import Comparison, Results, Verdict

ROW = Comparison("tiny", "fp16", "ours", "theirs", 2.0, 1.9, 2.1, Verdict.FASTER, 0.005, 0.01, 25)
RESULTS = Results(
    "theirs", "ours", 2.0, 1.9, 2.1, Verdict.FASTER, 0.01, 0.012, (ROW, replace(ROW, dtype="bf16"))
)


def printed(table: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lines_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=20)
    lines = progress.observer(console, verbose=False)
    assert isinstance(lines, progress.Lines)
    lines.stage("bench")
    for step in range(1, 100):
        now[0] += 1
        lines.advance(step / 100, f"case-{step}")
    lines.note("[not markup] and longer than the console is wide")
    lines.detail("never shown")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue().splitlines()
    assert shown[0] == "bench: started"
    assert shown[1] == "bench: 10%, case-10, 1 min 30 s left"
    assert shown[-1] == "[not markup] and longer than the console is wide"
    assert len(shown) == 11


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_being_done_has_an_end(terminal: bool) -> None:
    """It may be the name of a worker of another machine."""
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal)
    with progress.observer(console, verbose=not terminal) as shown:
        shown.stage("bench")
        shown.advance(0.5, "x" * 100_000)
    assert isinstance(console.file, io.StringIO)
    assert len(console.file.getvalue()) < 5000


def test_a_bar_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with progress.observer(console, verbose=False) as bar:
        assert isinstance(bar, progress.Bar)
        bar.stage("verify")
        bar.advance(0.5, "x" * 200)
        bar.note("stays")
        bar.stage("bench")
        bar.advance(0.25, "[odd] name")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "verify" in shown
    assert "50 %" in shown
    assert "stays" in shown
    assert "[odd] name" in shown


def test_results_table() -> None:
    shown = printed(tables.results_table(replace(RESULTS, control=(ROW,)), with_control=False))
    assert [line.split() for line in shown.splitlines() if "tiny" in line] == [
        ["tiny", "fp16", "0.01000", "0.00500", "2.00×", "1.90–2.10", "faster"],
        ["tiny", "bf16", "0.01000", "0.00500", "2.00×", "1.90–2.10", "faster"],
    ]
    assert (
        printed(tables.results_table(replace(RESULTS, control=(ROW,)), with_control=True)).count("tiny") == 3
    )


def test_verdict_line() -> None:
    assert tables.verdict_line(RESULTS) == (
        "faster: ours against theirs, 2.00× (95 % interval 1.90–2.10) "
        "in the geometric mean of 2 cases, noise floor 1.2%"
    )
    assert (
        ", 2.00× (95 % interval 1.90–2.10) in the geometric mean of 2 cases, on CPU A with AVX2, noise "
        in (tables.verdict_line(RESULTS, "CPU A with AVX2"))
    )
    skipped = {"small/fp16": "why", "small/fp16/ours": "why", "tiny/fp16/other": "why"}
    assert tables.verdict_line(replace(RESULTS, skipped=skipped)).endswith("; 1 case not timed")
    undecided = replace(RESULTS, verdict=Verdict.UNDECIDED, detectable_effect=0.031)
    called = (1 + undecided.margin) * 1.031 - 1
    assert tables.verdict_line(undecided).endswith(
        f"; in a typical case a difference of {called:.1%} would have been called"
    )
    assert tables.verdict_line(replace(RESULTS, cases=())) == "no verdict: no case was timed"


@pytest.mark.parametrize(
    ("milliseconds", "shown"), [(0.0123456, "0.01235"), (0.5, "0.5000"), (12.3, "12.300"), (math.nan, "–")]
)
def test_latency(milliseconds: float, shown: str) -> None:
    assert tables.latency(milliseconds) == shown
