"""Gates and what became of them, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cudadent42.decisions.gates import (
    PROFILE_PREFIX,
    Decision,
    Finding,
    Gate,
    GateOutcome,
    GateReport,
    OnFailure,
    Relation,
)

SHARES = ("slowdown", "noise_floor", "detectable_effect", "flagged_share")
"""Metrics of runs that read best in percent."""

_PROFILED_SHARES = (
    "profile.bank_conflicts",
    "profile.occupancy",
    "profile.occupancy_limit",
    "profile.l2_hit",
)
"""Likewise of profiles, beside those whose names end in ``_share``."""

_RATIOS = ("speedup", "session.improvement")

_MOST_LINES = 8
"""Findings of one gate that are shown; all are in gates.json."""

_RELATIONS = {
    Relation.AT_LEAST: "at least",
    Relation.AT_MOST: "at most",
    Relation.ABOVE: "above",
    Relation.BELOW: "below",
    Relation.IS: "",
    Relation.IS_NOT: "not",
}


def number(value: float | str, metric: str) -> str:
    """A value of the metric: ``4.1 %``, ``1.53×``, ``0.0123``."""
    if isinstance(value, str):
        return value
    if math.isnan(value):
        return "unknown"
    if metric in SHARES or _is_profiled_share(metric):
        return f"{100 * value:.2g} %" if abs(value) < 0.001 else f"{100 * value:.1f} %"
    if metric in _RATIOS:
        return f"{value:.3f}×"
    return f"{value:.4g}"


def _is_profiled_share(metric: str) -> bool:
    return metric in _PROFILED_SHARES or (metric.startswith(PROFILE_PREFIX) and metric.endswith("_share"))


def wanted(gate: Gate) -> str:
    """What the gate asks for: ``at most 3.0 %``, ``within 10 % of 0.100×``."""
    if gate.relation is Relation.WITHIN and not isinstance(gate.wanted, str):
        return f"within {100 * gate.wanted:g} % of {number(gate.of, gate.metric)}"
    return f"{_RELATIONS[gate.relation]} {number(gate.wanted, gate.metric)}".strip()


def report_lines(report: GateReport) -> tuple[str, ...]:
    """A line per gate that passed, and a line per finding of one that did not."""
    return tuple(line for outcome in report.outcomes for line in outcome_lines(outcome))


def outcome_lines(outcome: GateOutcome) -> list[str]:
    """One line if it passed, else one for each finding that did not pass, the worst first."""
    gate = outcome.gate
    if outcome.decision is Decision.PASSED:
        return [_line(gate, _tightest(outcome.findings), len(outcome.findings))]
    missed = [finding for finding in outcome.findings if finding.decision is not Decision.PASSED]
    missed.sort(key=lambda finding: (finding.decision is not Decision.FAILED, finding.distance))
    lines = [_line(gate, finding, 1) for finding in missed[:_MOST_LINES]]
    if len(missed) > _MOST_LINES:
        lines.append(f"{'':10} {gate.name}: and {len(missed) - _MOST_LINES} more cases")
    return lines


def _line(gate: Gate, finding: Finding, cases: int) -> str:
    word = finding.decision.value
    if finding.decision is not Decision.PASSED and gate.on_failure is OnFailure.WARN:
        word = "warning"
    where = f" of {finding.case}" if finding.case else ""
    if cases > 1:
        where += f" (the nearest of {cases} cases)"
    line = f"{word:10} {gate.name}: {gate.metric}{where} is {number(finding.value, gate.metric)}"
    if math.isfinite(finding.low) and math.isfinite(finding.high):
        line += f" ({number(finding.low, gate.metric)} to {number(finding.high, gate.metric)})"
    line += f", wanted {wanted(gate)}"
    if math.isfinite(finding.distance):
        size = number(abs(finding.distance), gate.metric)
        line += f", {size} {'to spare' if finding.distance >= 0 else 'off'}"
    return f"{line}; {finding.note}" if finding.note else line


def _tightest(findings: Sequence[Finding]) -> Finding:
    return min(findings, key=lambda finding: math.inf if math.isnan(finding.distance) else finding.distance)
