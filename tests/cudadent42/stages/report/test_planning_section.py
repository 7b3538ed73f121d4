"""What a report says of what is planned once a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_markdown import render, table_rows

from cudadent42.commands.tables import planning_table
from cudadent42.model.records import Results
from cudadent42.runs.run_folder import RunFolder
from cudadent42.stages.report import html
from cudadent42.stages.report.planning import LAYERS, planning_lines, plannings
from cudadent42.stages.report.view import View

PLUG_IN = "kernels/<b>.py:attention"


@pytest.fixture
def planned(small: RunFolder) -> RunFolder:
    """The candidate plans on two cases, and the baseline on one."""
    assert small.results is not None
    cases = tuple(replace(row, implementation=PLUG_IN, latency_ms=0.5) for row in small.results.cases)
    cases = (*cases[:-1], replace(cases[-1], baseline_latency_ms=2.0))
    planning_ms = {
        f"tiny/fp16/{PLUG_IN}": 16.0,
        f"small/fp16/{PLUG_IN}": 3.2,
        "large/fp16/pytorch": 0.064,
        "gone/fp16/pytorch": 1.0,
    }
    results = replace(small.results, candidate=PLUG_IN, cases=cases, control=(), planning_ms=planning_ms)
    return replace(small, results=results)


def results_of(run: RunFolder) -> Results:
    assert run.results is not None
    return run.results


def test_a_layer_has_its_part_of_the_plan(planned: RunFolder) -> None:
    assert LAYERS == 32
    timed = plannings(results_of(planned))
    assert [(each.case, each.implementation, each.call_ms, each.layer_ms) for each in timed] == [
        ("tiny/fp16", PLUG_IN, 0.5, 1.0),
        ("small/fp16", PLUG_IN, 0.5, 0.6),
        ("large/fp16", "pytorch", 2.0, 2.002),
    ]


def test_the_words(planned: RunFolder) -> None:
    assert list(planning_lines(results_of(planned))) == [
        "<b>.py:attention plans once a step, apart from its calls, which are compared without it: 3.20 ms to 16.0 ms. "
        "With the plan shared by 32 layers, each takes 1.20× to 2.00× the time of its call.",
        "pytorch plans once a step, apart from its calls, which are compared without it: 64.0 µs. "
        "With the plan shared by 32 layers, each takes 1.001× the time of its call.",
    ]


def test_the_comment_has_words_and_a_table(planned: RunFolder) -> None:
    text = render(planned).replace("\\", "")
    assert "&lt;b&gt;.py:attention plans once a step" in text
    assert "<b>" not in text.replace("<b></b>", "")
    rows = [row for row in table_rows(text) if len(row) == 5]
    assert ["Case", "Implementation", "Call", "Plan of a step", "Layer of 32"] in rows
    assert ["large/fp16", "pytorch", "2.00 ms", "64.0 µs", "2.00 ms"] in rows


def test_the_page_has_them_too(planned: RunFolder) -> None:
    section = html.render(View(planned)).partition('id="h-planning"')[2].partition("</section>")[0]
    assert "plans once a step" in section
    for cell in ("&lt;b&gt;.py:attention", "500 µs", "16.0 ms", "1.00 ms"):
        assert cell in section
    assert "<b>" not in section


def test_the_terminal_has_a_row_for_each(planned: RunFolder) -> None:
    table = planning_table(results_of(planned))
    assert table.row_count == 3
    assert [str(column.header) for column in table.columns][-1] == "Layer of 32"


def test_a_run_in_which_nobody_plans_says_nothing(small: RunFolder) -> None:
    assert plannings(small.results) == plannings(None) == ()
    assert 'id="h-planning"' not in html.render(View(small))
    assert "Plan of a step" not in render(small)
