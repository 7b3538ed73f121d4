"""Decisions with exit codes: conditions on what was measured, from TOML, with nothing evaluated as code."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

from cudadent42.decisions.gates import (
    Decision,
    Evidence,
    Finding,
    Gate,
    GateFile,
    GateOutcome,
    GateReport,
    Measured,
    OnFailure,
    counts,
    wants_profile,
)
from cudadent42.decisions.words import outcome_lines, report_lines
from cudadent42.model.records import Plan
from cudadent42.runs.gate_report import read_report, write_report
from cudadent42.stages.gates.evaluate import evaluate
from cudadent42.stages.gates.evidence import evidence_before, evidence_of
from cudadent42.stages.gates.loader import builtin_gates, load

__all__ = [
    "Decision",
    "Evidence",
    "Finding",
    "Gate",
    "GateFile",
    "GateOutcome",
    "GateReport",
    "Measured",
    "OnFailure",
    "builtin_gates",
    "check",
    "counts",
    "evaluate",
    "evidence_of",
    "judge",
    "load",
    "outcome_lines",
    "read_report",
    "report_lines",
    "wants_profile",
    "write_report",
]


def check(file: GateFile, plan: Plan, extra: Collection[str] = ()) -> None:
    """Raises UsageError for a gate on a metric or a case that a run of this plan cannot have.

    ``extra`` are metrics that the caller adds to those of the run.
    """
    evaluate(file, evidence_before(plan).with_metrics(dict.fromkeys(extra, math.nan)))


def judge(file: GateFile, folder: Path) -> GateReport:
    """The gates against a run folder; the outcome is also written there."""
    report = evaluate(file, evidence_of(folder))
    write_report(folder, report)
    return report
