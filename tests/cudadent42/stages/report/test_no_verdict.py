"""Where there is no verdict there is no headline number, in any format; and one count of checks in all of them."""

from __future__ import annotations

import html
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cudadent42.base.errors import UsageError
from cudadent42.commands import tables
from cudadent42.decisions.compare import compare
from cudadent42.model.records import (
    ErrorNorms,
    MachineReport,
    Plan,
    Results,
    Sample,
    Verdict,
    VerifiedCase,
    VerifyReport,
)
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.runs.run_folder import RunWriter, load_run
from cudadent42.stages import report
from cudadent42.stages.report.view import View

CASES = tuple(AttentionCase(name, "bf16", 1, 1, 1, 64, 64, 64) for name in ("a", "b"))
PLAN = Plan("test", "cpu", CASES, "pytorch", ("pytorch", "ours"), 25, 1, seed=3)
NORMS = ErrorNorms(1e-3, 1e-4, 1e-3)
VERIFY = VerifyReport(
    tuple(
        VerifiedCase(case.id, name, "random", NORMS, NORMS, ErrorNorms(2e-3, 2e-4, 2e-3), True)
        for case in CASES
        for name in ("pytorch", "ours")
    ),
    baseline="pytorch",
)

NUMBER = r"80[0-9](\.[0-9]+)?×"


def results_of(blocks: int, flags: str, spread: float) -> tuple[list[Sample], Results]:
    """``ours`` is 802 times as fast, give or take ``spread``."""
    random = np.random.default_rng(0)
    samples = [
        Sample(
            case.id,
            name,
            block,
            index,
            float((8.0 if name != "ours" else 8.0 / 802) * np.exp(random.normal(0.0, spread))),
            1,
            math.nan,
            0.5,
            flags,
        )
        for case in CASES
        for block in range(blocks)
        for index, name in enumerate(("pytorch", "pytorch_control", "ours"))
    ]
    return samples, compare(PLAN, samples, {}, {})


def written(folder: Path, samples: list[Sample], results: Results) -> Path:
    with RunWriter(folder, PLAN, MachineReport((), "", {}), None, ("test",)) as writer:
        for sample in samples:
            writer.append_sample(sample)
        writer.write_verify(VERIFY)
        writer.write_results(results)
    report.write(folder)
    return folder


@pytest.mark.parametrize(
    ("blocks", "flags", "spread", "why"),
    [
        (5, "", 0.001, "fewer than 8 blocks"),
        (25, "preempted", 0.001, "processors away"),
        (25, "", 20.0, ""),
    ],
    ids=["too few blocks", "disturbed", "wide"],
)
def test_no_format_shows_a_number_without_a_verdict(
    tmp_path: Path, blocks: int, flags: str, spread: float, why: str
) -> None:
    samples, results = results_of(blocks, flags, spread)
    assert results.verdict is Verdict.UNDECIDED
    folder = written(tmp_path / "run", samples, results)
    page = (folder / "report.html").read_text()
    headline = re.search(r'<h1 id="verdict">(.*?)</h1>', page, re.DOTALL)
    assert headline
    markdown = (folder / "report.md").read_text()
    line = tables.verdict_line(results)
    for shown in (headline[1], markdown.splitlines()[0], line.partition("95 % interval")[0]):
        assert "ndecided" in shown
        assert "×" not in shown
        assert not re.search(NUMBER, shown)
    assert "×**" not in markdown
    for shown in (html.unescape(page), markdown, line):
        assert why in shown
    if why:
        assert not re.search(NUMBER, markdown)


def test_a_verdict_keeps_its_number(tmp_path: Path) -> None:
    samples, results = results_of(25, "", 0.001)
    folder = written(tmp_path / "run", samples, results)
    assert "is faster than" in (folder / "report.md").read_text().splitlines()[0]
    assert re.search(NUMBER, tables.verdict_line(results))


def test_terminal_and_report_count_the_same_checks(tmp_path: Path) -> None:
    samples, results = results_of(25, "", 0.001)
    view = View(load_run(written(tmp_path / "run", samples, results)))
    assert view.verification_line.startswith("2 of 2 checks passed")
    assert tables.verify_line(VERIFY) == "verification passed: 2 checks"
    failed = replace(VERIFY, cases=(replace(VERIFY.cases[0], passed=False), *VERIFY.cases[1:]))
    assert tables.verify_line(failed) == "verification failed: 1 of 3 checks"


def test_the_readme_shows_no_refused_run(tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[4] / "tools"))
    import update_readme

    samples, results = results_of(5, "", 0.001)
    with pytest.raises(UsageError, match="only such a run may be shown"):
        update_readme.section([str(written(tmp_path / "run", samples, results))])
    samples, results = results_of(25, "", 20.0)
    text = update_readme.section([str(written(tmp_path / "wide", samples, results))])
    assert "[undecided](" in text
