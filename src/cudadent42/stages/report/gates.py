"""The gates of a run, for its reports."""

from __future__ import annotations

from dataclasses import dataclass

from cudadent42.decisions.gates import Decision, GateReport
from cudadent42.decisions.words import number, wanted
from cudadent42.model import text
from cudadent42.runs.gate_report import read_report
from cudadent42.stages.report.view import View


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


def gate_report(view: View) -> GateReport | None:
    """What the run was held against; None where it was not."""
    return read_report(view.run.path)


def headline(report: GateReport) -> str:
    word = {
        Decision.PASSED: "passed",
        Decision.FAILED: "failed",
        Decision.UNDECIDED: "not decided: the measurement could not tell",
    }[report.decision]
    return text.clean(f"The gates of {report.file} are {word}.")


def rows(report: GateReport) -> list[GateRow]:
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
