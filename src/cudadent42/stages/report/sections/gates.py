"""What the run was held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cudadent42.decisions.gates import Decision, GateReport
from cudadent42.decisions.words import number, report_lines, wanted
from cudadent42.model import text
from cudadent42.runs.gate_report import read_report
from cudadent42.stages.report.escaping import escape
from cudadent42.stages.report.section import Section, Text
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View

_HTML = """
<p>{{ gate_line }}</p>
<div class="scroll" tabindex="0" role="region" aria-labelledby="h-gates">
<table id="gates">
<thead><tr><th scope="col">Gate</th><th scope="col">Case</th><th scope="col">Outcome</th><th scope="col">Metric</th><th scope="col" class="n">Value</th><th scope="col">95 % interval</th><th scope="col">Wanted</th><th scope="col">Able to tell</th></tr></thead>
<tbody>{% for row in gate_rows %}
<tr><th scope="row">{{ row.name }}</th><td>{{ row.case }}</td><td><span class="v{{ " v-slower" if row.decision == "failed" else " v-undecided" if row.decision == "undecided" }}">{{ row.decision }}</span></td><td>{{ row.metric }}</td><td class="n lead">{{ row.value }}</td><td>{{ row.interval }}</td><td>{{ row.wanted }}</td><td class="wrap m">{{ row.note }}</td></tr>
{% endfor %}</tbody></table></div>
"""


@dataclass(frozen=True)
class GateRow:
    """One gate on one case, or on the run."""

    name: str
    metric: str
    case: str
    decision: str
    value: str
    interval: str
    wanted: str
    note: str


def _filled(view: View, sheet: Sheet) -> dict[str, Any] | None:
    judged = read_report(view.run.path)
    return None if judged is None else {"gate_line": _headline(judged), "gate_rows": _rows(judged)}


def _headline(report: GateReport) -> str:
    word = {
        Decision.PASSED: "passed",
        Decision.FAILED: "failed",
        Decision.UNDECIDED: "not decided: the measurement could not tell",
    }[report.decision]
    return text.clean(f"The gates of {report.file} are {word}.")


def _rows(report: GateReport) -> list[GateRow]:
    """Every finding, those that did not pass first."""
    ranked = [
        (
            finding.decision is Decision.PASSED,
            GateRow(
                name=text.clean(outcome.gate.name),
                metric=text.clean(outcome.gate.metric),
                case=text.clean(finding.case),
                decision=finding.decision.value,
                value=text.clean(number(finding.value, outcome.gate.metric)),
                interval=""
                if finding.low != finding.low
                else f"{number(finding.low, outcome.gate.metric)} to {number(finding.high, outcome.gate.metric)}",
                wanted=text.clean(wanted(outcome.gate)),
                note=text.clean(finding.note),
            ),
        )
        for outcome in report.outcomes
        for finding in outcome.findings
    ]
    return [row for _, row in sorted(ranked, key=lambda pair: pair[0])]


def _lines(view: View) -> Iterator[str]:
    judged = read_report(view.run.path)
    if judged is not None:
        lines = [f"* {escape(' '.join(line.split()))}" for line in report_lines(judged)]
        yield "\n".join([escape(_headline(judged)), "", *lines])


SECTION = Section("gates", "Gates", _HTML, _filled, texts=(Text(20, _lines),))
