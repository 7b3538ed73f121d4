"""Whether a run's result may be quoted as a claim: one decision tree, described in docs/defences.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from types import MappingProxyType

from cudadent42.decisions.margin import upper
from cudadent42.decisions.sampling import chance_to_meet, chance_to_meet_by_number
from cudadent42.model.integrity import Confirmation, Grade, Integrity, Way, peer_in
from cudadent42.model.records import Comparison, Results, Verdict
from cudadent42.model.text import clean

SHORT_MS = 0.03
"""A saving of a call that the audit of a CPU cannot tell: in processes apart a call of one code differs by 0.01 to
0.03 ms from what it takes in the run, as its threads wake and its code is cold. Who cheats gains nothing below it."""

NOT_ASKED = "this run was not to be audited"
"""Why there was no audit, where the person who started the run wanted none."""

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
        return _of_no_gain(results, integrity)
    if integrity.why_not_audited:
        return Claim(False, f"not confirmed: {integrity.why_not_audited}")
    own = _of_candidate(results)
    confirmed = [each for each in own if each.confirmed]
    left_out = not_credited(results)
    missed = _missed(own, left_out) or ([] if confirmed else own)
    if missed:
        return Claim(False, f"not confirmed on {missed[0].case}: {why_missed(missed[0], results)}")
    if not confirmed:
        return Claim(False, "not confirmed: no case was audited")
    mean = credited_mean(results, left_out)
    if mean.low <= upper(results.margin):
        return Claim(
            False,
            f"of {len(left_out)} cases what a call saves is too short to be confirmed, and without it the mean is "
            f"{mean.speedup:.3f} ({mean.low:.3f} to {mean.high:.3f})",
        )
    calls = sum(each.calls_checked for each in own)
    return Claim(
        True,
        f"confirmed on {len(confirmed)} of {len(results.cases)} cases in processes apart, {calls} results of fresh "
        f"inputs compared by the parent; {_what_is_left(results, len(confirmed), left_out)}",
    )


def _of_no_gain(results: Results, integrity: Integrity) -> Claim:
    """Of what is called as fast or slower. On a CPU audits look at that too: it may be slower still."""
    reason = f"measured as {results.verdict.value}, which nobody gains by"
    if not integrity.short_ms:
        return Claim(True, reason)
    if integrity.why_not_audited not in ("", NOT_ASKED):
        return Claim(False, f"not confirmed: {integrity.why_not_audited}")
    own = _of_candidate(results)
    if missed := _missed(own, not_credited(results)):
        return Claim(
            False,
            f"not confirmed on {missed[0].case}: in processes apart a call takes {missed[0].latency_ms:.4g} ms, and "
            f"one of the baseline {missed[0].baseline_latency_ms:.4g} ms",
        )
    seen = f"; in processes apart it is not slower on {len(own)} of {len(results.cases)} cases" if own else ""
    return Claim(True, reason + seen)


def _of_candidate(results: Results) -> list[Confirmation]:
    confirmations = results.integrity.confirmations if results.integrity is not None else ()
    return [each for each in confirmations if each.implementation == results.candidate]


def _missed(own: Sequence[Confirmation], left_out: Sequence[str]) -> list[Confirmation]:
    """Those that are not confirmed, without the cases whose saving counts as none."""
    return [each for each in own if not each.confirmed and each.case not in left_out]


def _what_is_left(results: Results, confirmed: int, left_out: Sequence[str]) -> str:
    """What so many confirmed cases tell of the others."""
    integrity = results.integrity
    assert integrity is not None
    credited = [row for row in claimed_rows(results, results.candidate) if row.case_id not in left_out]
    claims, drawn, highest = max(confirmed, len(credited)), confirmed, ""
    if integrity.highest_first and confirmed < claims:
        claims, drawn, highest = claims - 1, confirmed - 1, "the highest speed-up is one of them; "
    meet, part = (
        (chance_to_meet, "is gained")
        if integrity.drawn_by_gain
        else (chance_to_meet_by_number, "is called faster")
    )
    few = f"; {len(left_out)} too short to be confirmed count as equal" if left_out else ""
    return (
        f"{highest}if a third of what {part} were not, this would have shown it in "
        f"{meet(claims, drawn):.0%} of runs{few}"
    )


@dataclass(frozen=True)
class Mean:
    """A geometric mean of speed-ups, with its 95 % interval."""

    speedup: float
    low: float
    high: float


def is_short(row: Comparison, short_ms: float) -> bool:
    """Whether what a call is said to save is less than an audit can tell."""
    return 0.0 < row.saved_ms < short_ms


def not_credited(results: Results) -> list[str]:
    """Cases of the candidate whose saving counts as none in a claim: too short, and not confirmed."""
    integrity = results.integrity
    if integrity is None:
        return []
    confirmed = {each.case for each in _of_candidate(results) if each.confirmed}
    short = [row for row in results.cases if is_short(row, integrity.short_ms) and row.speedup > 1.0]
    return [row.case_id for row in short if row.case_id not in confirmed]


def credited_mean(results: Results, left_out: Sequence[str]) -> Mean:
    """Of the candidate over all cases, with ``left_out`` as equal to the baseline: what is `not_credited`.

    Where there are none, the run's own. Else the interval is of the cases' own, whose blocks are independent.
    """
    if not left_out:
        return Mean(results.speedup_geomean, results.speedup_geomean_ci_low, results.speedup_geomean_ci_high)
    rows = [row for row in results.cases if row.case_id not in left_out]
    count = len(results.cases)
    centre = sum(log(row.speedup) for row in rows) / count
    below = sqrt(sum(log(row.speedup / row.ci_low) ** 2 for row in rows)) / count
    above = sqrt(sum(log(row.ci_high / row.speedup) ** 2 for row in rows)) / count
    return Mean(exp(centre), exp(centre - below), exp(centre + above))


def why_missed(missed: Confirmation, results: Results) -> str:
    """What the audit saw of a case that it does not confirm."""
    rows = {(row.case_id, row.implementation): row for row in (*results.cases, *results.others)}
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
    claimed_ms = row.saved_ms
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
    left_out = not_credited(results) if results.verdict is Verdict.FASTER else []
    mean = credited_mean(results, left_out)
    cases = "1 case" if len(results.cases) == 1 else f"{len(results.cases)} cases"
    if declined := declined_by(results, results.candidate):
        cases = f"{len(results.cases)} of {len(results.cases) + declined} cases, as it does not do the others"
    if left_out:
        cases += f", {len(left_out)} of them counted as equal because they are too short to be confirmed"
    peer = peer_in(results.integrity.notes, results.candidate) if results.integrity is not None else ""
    names = f"{_plain(results.candidate)} is {_RELATIONS[results.verdict]} {_plain(results.baseline)}"
    return (
        f"{names}: {mean.speedup:.3f}× its speed (95 % interval {mean.low:.3f} to {mean.high:.3f}; "
        f"geometric mean of {cases}; run {_plain(run)}"
        f"{f'; it runs the work of {_plain(peer)}' if peer else ''}{f'; with {conditions}' if conditions else ''})."
    )


def declined_by(results: Results, implementation: str) -> int:
    """Cases that an implementation alone was not timed on, mostly as it does not do them: who leaves out what it is
    slow at has a better mean."""
    return sum(key.endswith(f"/{implementation}") for key in results.skipped)


_NOT_IN_NAMES = re.compile(r"[^\w./\\:@~^+=,\[\]-]+")


def _plain(name: str) -> str:
    """A name that says nothing: a file may be called like a sentence, which would be quoted with ours."""
    return _NOT_IN_NAMES.sub("_", name)


_RELATIONS = {
    Verdict.FASTER: "faster than",
    Verdict.SLOWER: "slower than",
    Verdict.EQUAL: "as fast as",
}
"""There is no claim of what is undecided."""
