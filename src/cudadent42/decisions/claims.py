"""Whether a run's result may be quoted as a claim: one decision tree, described in docs/defences.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from cudadent42.decisions.sampling import chance_to_meet, chance_to_meet_by_number
from cudadent42.model.integrity import Confirmation, Grade, Way
from cudadent42.model.records import Comparison, Results, Verdict
from cudadent42.model.text import clean

_NOTHING_SET: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Claim:
    """May it be quoted, and why or why not."""

    allowed: bool
    reason: str


def claim(results: Results, *, verified: bool) -> Claim:
    """``verified``: every check of verification passed, those after timing too.

    Only what was looked at can be claimed, so a run of a version that did not look has none, and no reason either.
    """
    integrity = results.integrity
    if integrity is None:
        return Claim(False, "")
    if not results.cases:
        return Claim(False, "nothing was compared")
    if not verified:
        return Claim(False, "verification failed")
    for grade in (Grade.FAILED, Grade.SUSPECT):
        for finding in integrity.findings:
            if finding.grade is grade:
                return Claim(False, finding.line)
    if results.refused is not None:
        return Claim(False, f"no verdict: {results.refused.value}")
    if results.verdict is Verdict.UNDECIDED:
        return Claim(False, "the measurement could not tell")
    if results.verdict is not Verdict.FASTER:
        return Claim(True, f"measured as {results.verdict.value}, which nobody gains by")
    if integrity.why_not_audited:
        return Claim(False, f"not confirmed: {integrity.why_not_audited}")
    own = [each for each in integrity.confirmations if each.implementation == results.candidate]
    missed = [each for each in own if not each.confirmed]
    if missed:
        return Claim(False, f"not confirmed on {missed[0].case}: {why_missed(missed[0], results)}")
    if not own:
        return Claim(False, "not confirmed: no case was audited")
    calls = sum(each.calls_checked for each in own)
    claims = max(len(own), len(claimed_rows(results, results.candidate)))
    meet, part = (
        (chance_to_meet, "is gained")
        if integrity.drawn_by_gain
        else (chance_to_meet_by_number, "is called faster")
    )
    return Claim(
        True,
        f"confirmed on {len(own)} of {len(results.cases)} cases in processes apart, {calls} results of fresh inputs "
        f"compared by the parent; if a third of what {part} were not, this would have shown it in "
        f"{meet(claims, len(own)):.0%} of runs",
    )


def why_missed(missed: Confirmation, results: Results) -> str:
    """What the audit saw of a case that it does not confirm."""
    rows = {(f"{row.name}/{row.dtype}", row.implementation): row for row in (*results.cases, *results.others)}
    row = rows.get((missed.case, missed.implementation))
    if row is not None and not missed.comparable:
        return (
            f"a call of the baseline takes {missed.baseline_latency_ms:.4g} ms in processes apart and "
            f"{row.baseline_latency_ms:.4g} ms in the run: {_DISTURBED[missed.way]}"
        )
    saved = (
        f"in processes apart a call saved {missed.saved_ms:.4g} ms "
        f"({missed.ci_low_ms:.4g} to {missed.ci_high_ms:.4g})"
    )
    if row is None:
        return saved
    claimed_ms = row.baseline_latency_ms - row.latency_ms
    if missed.ci_low_ms > 0.0 and missed.saved_ms >= claimed_ms / 2 and missed.latency_ms > 0.0:
        ratio = missed.baseline_latency_ms / missed.latency_ms
        return f"in processes apart it was {ratio:.3g} times as fast as the baseline, and {row.speedup:.3g} in the run"
    return f"{saved}, and {claimed_ms:.4g} ms in the run{_noise(missed, claimed_ms)}"


_BUSY_GPU = (
    "in two races something kept the GPU busy or its clocks low; repeat it when nothing else uses the GPU"
)
_DISTURBED = {
    Way.SHARED: "waking for each call, or other work beside it, hides what is saved; repeat it on an idle machine",
    Way.ALONE: _BUSY_GPU,
    Way.GRAPH: _BUSY_GPU,
    Way.QUEUED: "launching it, or other work beside it, hides what is saved; --timer call times the launches too",
}
"""Why the audit's clock shows another baseline than the run's, by how the calls were made."""


def _noise(missed: Confirmation, claimed_ms: float) -> str:
    """Where the interval does not tell the run's saving from none."""
    told = missed.ci_low_ms > 0.0 or missed.ci_high_ms < claimed_ms
    return "" if told else "; the audit was too noisy to tell, so repeat it on an idle machine"


def claimed_rows(results: Results, implementation: str) -> list[Comparison]:
    """What an implementation is called faster by: its faster rows, or all that count where only the verdict on all of
    them together says so."""
    rows = rows_that_count(results, implementation)
    return [row for row in rows if row.verdict is Verdict.FASTER] or rows


def rows_that_count(results: Results, implementation: str) -> list[Comparison]:
    """Of an implementation, without those that are refused."""
    return [
        row
        for row in (*results.cases, *results.others)
        if row.implementation == implementation and row.refused is None
    ]


def with_claim(results: Results, *, verified: bool) -> Results:
    """The results, with whether they may be quoted."""
    allowance = claim(results, verified=verified)
    return replace(results, claim_allowed=allowance.allowed, claim_reason=allowance.reason)


_NO_CONDITIONS = frozenset({"CUDADENT42_RATE", "CUDA_VISIBLE_DEVICES"})
"""Variables that hold nobody back."""


def quotable(results: Results, run: str, environment: Mapping[str, str] = _NOTHING_SET) -> str:
    """The one sentence that may be quoted of a run of this name; empty where there is no claim.

    ``environment``: variables that change what is measured, as the manifest has them. Who sets one for the run may have
    held the baseline to fewer threads or older instructions, so the sentence says so.
    """
    if not results.claim_allowed:
        return ""
    conditions = ", ".join(
        f"{name}={clean(environment[name])}" for name in sorted(environment.keys() - _NO_CONDITIONS)
    )
    low, high = results.speedup_geomean_ci_low, results.speedup_geomean_ci_high
    cases = "1 case" if len(results.cases) == 1 else f"{len(results.cases)} cases"
    return (
        f"{results.candidate} is {_RELATIONS[results.verdict]} {results.baseline}: {results.speedup_geomean:.3f}× its "
        f"speed (95 % interval {low:.3f} to {high:.3f}; geometric mean of {cases}; run {run}"
        f"{f'; with {conditions}' if conditions else ''})."
    )


_RELATIONS = {
    Verdict.FASTER: "faster than",
    Verdict.SLOWER: "slower than",
    Verdict.EQUAL: "as fast as",
}
"""There is no claim of what is undecided."""
