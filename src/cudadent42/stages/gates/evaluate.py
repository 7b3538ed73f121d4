"""Gates against evidence: three answers, since a measurement may not be able to tell.

the 95 % interval wholly inside what passes -> passed
the 95 % interval wholly outside            -> failed
otherwise                                   -> undecided
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from cudadent42.base.errors import UsageError
from cudadent42.base.toml import did_you_mean
from cudadent42.decisions.gates import (
    PROFILE_PREFIX,
    Decision,
    Evidence,
    Finding,
    Gate,
    GateFile,
    GateOutcome,
    GateReport,
    Measured,
    Relation,
    Scope,
)
from cudadent42.decisions.statistics import INTERVAL_FACTOR, POWER_FACTOR
from cudadent42.decisions.verdicts import MIN_BLOCKS
from cudadent42.model.records import Verdict
from cudadent42.profiles.names import METRICS, is_known
from cudadent42.stages.gates.evidence import CASE_METRICS, RUN_METRICS, WORDS

_MOST_BLOCKS = 100_000
"""More than this many blocks are not advised: the value is as good as on the threshold."""


def evaluate(file: GateFile, evidence: Evidence) -> GateReport:
    """Each gate's outcome.

    Raises UsageError for a metric or a case that does not exist, and for a threshold that does not suit its metric.
    """
    return GateReport(file.name, tuple(_evaluate(gate, evidence, file.name) for gate in file.gates))


def _evaluate(gate: Gate, evidence: Evidence, where: str) -> GateOutcome:
    asked = _asked(gate, evidence, where)
    _check_kind(gate, where)
    findings = tuple(_find(gate, case, measured) for case, measured in asked.items())
    decisions = {finding.decision for finding in findings}
    for decision in (Decision.FAILED, Decision.UNDECIDED):
        if decision in decisions:
            return GateOutcome(gate, decision, findings)
    return GateOutcome(gate, Decision.PASSED, findings)


def _check_kind(gate: Gate, where: str) -> None:
    """A word that the metric never is would make a gate that guards nothing, or that nothing passes."""
    gate_where, words = f"{where}, gate {gate.name!r}", WORDS.get(gate.metric)
    about_words = gate.relation in (Relation.IS, Relation.IS_NOT)
    if words is None:
        if about_words and gate.metric in (*RUN_METRICS, *CASE_METRICS):
            raise UsageError(
                f"{gate_where}: {gate.metric} is a number; compare it with a number, not with {gate.wanted!r}"
            )
        return
    if not about_words:
        raise UsageError(
            f"{gate_where}: {gate.metric} is a word; use `is` or `is_not`, not `{gate.relation.value}`"
        )
    if gate.wanted not in words:
        near = did_you_mean(str(gate.wanted), words)
        raise UsageError(
            f"{gate_where}: {gate.metric} is never {gate.wanted!r}; it is one of {', '.join(words)}{near}"
        )


def _asked(gate: Gate, evidence: Evidence, where: str) -> Mapping[str, Measured]:
    """What the gate is about, by ``Case.id`` (empty for the run as a whole)."""
    if gate.scope is Scope.OVERALL:
        if gate.metric in evidence.overall:
            return {"": evidence.overall[gate.metric]}
        if gate.metric.startswith(PROFILE_PREFIX):
            return {"": _not_profiled(gate, evidence, where)}
        metrics = sorted({*RUN_METRICS, *evidence.overall})
        hint = ""
        if gate.metric in CASE_METRICS:
            hint = f'; {gate.metric!r} is a metric of cases: add cases = "every"'
        raise _unknown(gate, metrics, where, hint)
    if gate.metric not in evidence.cases:
        raise _unknown(gate, sorted({*CASE_METRICS, *evidence.cases}), where, " for single cases")
    by_case = evidence.cases[gate.metric]
    if not gate.cases:
        return by_case or {"": Measured(math.nan, reason="there is no case")}
    for name in gate.cases:
        if not any(_is_case(name, case) for case in by_case):
            raise UsageError(
                f"{where}, gate {gate.name!r}: the run has no case {name!r}; it has {', '.join(by_case)}"
                + did_you_mean(name, by_case)
            )
    return {
        case: measured
        for case, measured in by_case.items()
        if any(_is_case(name, case) for name in gate.cases)
    }


def _not_profiled(gate: Gate, evidence: Evidence, where: str) -> Measured:
    """A metric that the run's profile does not have, if there is one."""
    name = gate.metric.removeprefix(PROFILE_PREFIX)
    if not is_known(name):
        near = did_you_mean(name, METRICS)
        raise UsageError(
            f"{where}, gate {gate.name!r}: a profile has no metric {name!r}{near}; `metrics` in a profile.json has "
            "their names"
        )
    if any(each.startswith(PROFILE_PREFIX) for each in evidence.overall):
        return Measured(math.nan, reason="the run folder's profile does not have it")
    return Measured(math.nan, reason="the run folder has no profile; `cudadent42 doctor RUN` makes one")


def _is_case(name: str, case: str) -> bool:
    return name in (case, case.rpartition("/")[0])


def _unknown(gate: Gate, metrics: list[str], where: str, hint: str) -> UsageError:
    near = did_you_mean(gate.metric, metrics)
    return UsageError(
        f"{where}, gate {gate.name!r}: unknown metric {gate.metric!r}{hint}; expected one of {', '.join(metrics)}{near}"
    )


def _find(gate: Gate, case: str, measured: Measured) -> Finding:
    value = measured.value
    if isinstance(value, str) or gate.relation in (Relation.IS, Relation.IS_NOT):
        return _find_word(gate, case, measured)
    low, high = (value, value) if measured.exact else (measured.low, measured.high)
    start, stop = gate.band
    distance = min(value - start, stop - value)
    decision, note = Decision.UNDECIDED, ""
    if not all(map(math.isfinite, (value, low, high))):
        note = measured.reason or "it was not measured"
    elif 0 < measured.blocks < MIN_BLOCKS:
        note = f"{measured.blocks} blocks are too few to tell; at least {MIN_BLOCKS} are needed"
    elif _inside(low, gate) and _inside(high, gate):
        decision = Decision.PASSED
        note = "" if measured.exact else "the measurement can tell"
    elif high < start or low > stop or measured.exact or (low == high and not _inside(low, gate)):
        decision = Decision.FAILED
        note = "" if measured.exact else "the measurement can tell"
    else:
        note = f"the measurement cannot tell: {_advice(measured, start, stop)}"
    return Finding(case, decision, value, measured.low, measured.high, distance, note)


def _inside(value: float, gate: Gate) -> bool:
    start, stop = gate.band
    if gate.relation is Relation.ABOVE:
        return value > start
    if gate.relation is Relation.BELOW:
        return value < stop
    return start <= value <= stop


def _advice(measured: Measured, start: float, stop: float) -> str:
    """How many blocks narrow the interval so far that it is on one side of the ends that lie in it in four
    repetitions out of five. An interval that just reaches the end from where the value now lies is over it in every
    other one.

    Only what the blocks themselves leave open shrinks with their root. What the control adds is taken to stay: it may
    be chance, but a copy of the same code can also be slower for good, by where it lies in memory, and then no number
    of blocks helps.
    """
    if isinstance(measured.value, str):
        return ""
    low, high = measured.from_blocks or (measured.low, measured.high)
    needed = 0.0
    for end in (start, stop):
        if not measured.low <= end <= measured.high:
            continue
        below = end < measured.value
        reach = measured.value - low if below else high - measured.value
        added = low - measured.low if below else measured.high - high
        gap = abs(measured.value - end)
        if gap == 0:
            return "the value lies on the threshold"
        if gap <= added:
            return (
                "its interval reaches over the threshold by what the control differs from itself, which more blocks "
                "may not mend; measure on a quieter machine"
            )
        narrower = reach / INTERVAL_FACTOR * POWER_FACTOR / (gap - added)
        narrower = min(narrower, _MOST_BLOCKS)  # more than that is not advised in any case
        needed = max(needed, measured.blocks * narrower**2)
    if not needed < _MOST_BLOCKS:
        return "the value lies on the threshold"
    blocks = max(measured.blocks + 1, math.ceil(needed))
    return (
        f"its interval reaches over the threshold; about {blocks} blocks would settle it four times out of five (now "
        f"{measured.blocks})"
    )


def _find_word(gate: Gate, case: str, measured: Measured) -> Finding:
    value = measured.value
    nothing = math.nan
    if not isinstance(value, str):
        if math.isfinite(value):
            raise UsageError(
                f"gate {gate.name!r}: {gate.metric} is a number; compare it with a number, not with {gate.wanted!r}"
            )
        note = measured.reason or "it was not measured"
        return Finding(case, Decision.UNDECIDED, value, nothing, nothing, nothing, note)
    if gate.relation not in (Relation.IS, Relation.IS_NOT):
        raise UsageError(
            f"gate {gate.name!r}: {gate.metric} is a word; use `is` or `is_not`, not `{gate.relation.value}`"
        )
    decision = (
        Decision.PASSED if (value == gate.wanted) is (gate.relation is Relation.IS) else Decision.FAILED
    )
    note = ""
    if value == Verdict.UNDECIDED.value != gate.wanted:
        decision, note = Decision.UNDECIDED, "the measurement cannot tell"
    return Finding(case, decision, value, nothing, nothing, nothing, note)
