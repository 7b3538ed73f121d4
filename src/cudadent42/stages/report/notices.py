"""What a reader must know before, and what must not be read into, the numbers."""

from __future__ import annotations

import math
from collections import defaultdict

from cudadent42.decisions.verdicts import REFUSALS
from cudadent42.model import text
from cudadent42.model.integrity import Grade
from cudadent42.model.records import Comparison, Refusal, Results, Status, Verdict, VerifiedCase
from cudadent42.operations import definition
from cudadent42.runs.run_folder import RunStatus
from cudadent42.stages.report.cases import shares_of_bound
from cudadent42.stages.report.view import Notice, Tone, View

_MOST_LINES = 12
_NOISY = 0.05
"""Noise floor from which the page warns, and share of disturbed blocks."""


def notices(view: View) -> tuple[Notice, ...]:
    """In order of weight: wrong results, missing results, results to be read with care."""
    candidates = (
        _verification(view),
        _builds(view),
        _unfinished(view),
        _unverified(view),
        _skipped(view),
        _preflight(view),
        *(cautions(view.run.results) if view.run.results else ()),
    )
    return tuple(notice for notice in candidates if notice is not None)


def cautions(results: Results) -> tuple[Notice, ...]:
    """How the machine behaved while it was measured; for the terminal too."""
    return (
        *_integrity(results),
        *_refused(results),
        *(notice for notice in (_control(results), _flagged(results)) if notice is not None),
    )


def describe_failure(entry: VerifiedCase) -> str:
    """One failed check in one line."""
    shares = [share for share in shares_of_bound(entry) if not math.isnan(share)]
    line = f"{entry.case}, {text.implementation(entry.implementation)}, {entry.input} input"
    if shares:
        line += f": error is {text.figures(max(shares))} times its bound"
    if entry.detail:
        line += f" ({entry.detail})"
    return text.clean(line)


def _verification(view: View) -> Notice | None:
    if not view.failures:
        return None
    return Notice(
        Tone.BAD,
        f"{text.plural(len(view.failures), 'check')} failed verification; what failed is not compared",
        _limited([describe_failure(entry) for entry in view.failures]),
    )


def _builds(view: View) -> Notice | None:
    failures = view.run.build.failures if view.run.build else ()
    if not failures:
        return None
    lines = [text.clean(f"{f.kernel} for {f.architecture}: {f.message}") for f in failures]
    return Notice(Tone.BAD, f"{text.plural(len(failures), 'kernel')} did not build", _limited(lines))


def _unfinished(view: View) -> Notice | None:
    if view.complete:
        return None
    manifest = view.run.manifest
    title = {
        RunStatus.INTERRUPTED: "The run was interrupted",
        RunStatus.FAILED: "The run failed",
        RunStatus.RUNNING: "The run has not finished",
        RunStatus.FINISHED: "The run ended without a complete result",
    }[manifest.status]
    lines = [text.clean(manifest.error)] if manifest.error else []
    missing = [
        what
        for what, absent in (
            ("build", view.run.build is None),
            ("verification", view.run.verify is None),
            ("samples", not view.run.samples),
            ("comparison", view.run.results is None),
        )
        if absent
    ]
    if missing:
        lines.append(f"Missing: {', '.join(missing)}.")
    sampled = len({sample.case for sample in view.run.samples})
    lines.append(
        f"Kept: {text.plural(len(view.run.samples), 'sample')} of {sampled} of "
        f"{text.plural(len(view.rows), 'case')}; {len(view.timed)} compared."
    )
    if view.partial:
        blocks = [row.comparison.blocks for row in view.timed if row.comparison]
        lines.append(
            f"Partial: compared over {min(blocks)} to {max(blocks)} of {view.run.plan.repeats} planned blocks per case."
        )
    return Notice(Tone.WARN, title, tuple(lines))


def _unverified(view: View) -> Notice | None:
    if view.run.verify is not None or not view.timed:
        return None
    return Notice(Tone.BAD, "These results were not verified", ("The run folder holds no verify.json.",))


def _skipped(view: View) -> Notice | None:
    """What was left out for other reasons than a failed check, which has its own notice."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for key, reason in (view.run.results.skipped if view.run.results else {}).items():
        if not (view.failures and reason.startswith("failed verification")):
            by_reason[reason].append(key)
    if not by_reason:
        return None
    lines = [
        text.clean(f"{reason}: {keys[0]}" + (f" and {len(keys) - 1} more" if len(keys) > 1 else ""))
        for reason, keys in by_reason.items()
    ]
    return Notice(Tone.WARN, f"{sum(map(len, by_reason.values()))} not timed", _limited(lines))


def _preflight(view: View) -> Notice | None:
    if not view.warnings:
        return None
    failed = sum(check.status is Status.FAIL for check in view.warnings)
    title = (
        f"The machine failed {text.plural(failed, 'preflight check')}"
        if failed
        else f"Preflight gave {text.plural(len(view.warnings), 'warning')}"
    )
    lines = [text.clean(f"{c.name}: {c.detail}" + (f"; {c.cause}" if c.cause else "")) for c in view.warnings]
    return Notice(Tone.BAD if failed else Tone.WARN, title, _limited(lines))


def _integrity(results: Results) -> list[Notice]:
    """What was found of the candidates, and why a difference that was measured is no claim."""
    integrity = results.integrity
    if integrity is None:
        return []
    integrity_notices = []
    for grade, tone in ((Grade.FAILED, Tone.BAD), (Grade.SUSPECT, Tone.BAD)):
        lines = [text.clean(each.line) for each in integrity.findings if each.grade is grade]
        if lines:
            word = "failed" if grade is Grade.FAILED else "is suspect by"
            title = f"The candidate {word} {text.plural(len(lines), 'check')} of integrity; no speed of it is a claim"
            integrity_notices.append(Notice(tone, title, _limited(lines)))
    if integrity.sound and results.verdict is Verdict.FASTER and not results.claim_allowed:
        integrity_notices.append(
            Notice(Tone.WARN, text.clean(f"Faster, and no claim: {results.claim_reason}"))
        )
    if integrity.notes:
        integrity_notices.append(
            Notice(
                Tone.NEUTRAL,
                "Settings kept apart, and what was declared",
                _limited(list(map(text.clean, integrity.notes))),
            )
        )
    return integrity_notices


def _refused(results: Results) -> list[Notice]:
    """Measurements that are none, with what to do."""
    rows = (*results.cases, *results.others, *results.control)
    refusals = []
    for refusal in Refusal:
        refused = [row for row in rows if row.refused is refusal]
        if refused:
            names = dict.fromkeys(row.case_id for row in refused)
            title = (
                f"{text.plural(len(names), 'case')} without a verdict ({refusal.value}): {REFUSALS[refusal]}"
            )
            lines = [_impossible(row) for row in refused] if refusal is Refusal.IMPOSSIBLE else list(names)
            tone = Tone.BAD if refusal is Refusal.IMPOSSIBLE else Tone.WARN
            refusals.append(Notice(tone, title, _limited(list(map(text.clean, dict.fromkeys(lines))))))
    return refusals


def _impossible(row: Comparison) -> str:
    """The side that is too fast, with both figures."""
    own = row.latency_ms <= 0 or row.latency_ms < row.floor_ms
    name, latency = (row.implementation, row.latency_ms) if own else (row.baseline, row.baseline_latency_ms)
    return (
        f"{row.name}/{row.dtype}, {name}: {text.figures(latency)} ms, where this machine needs at least "
        f"{text.figures(row.floor_ms)} ms at twice its measured peaks"
    )


def _control(results: Results) -> Notice | None:
    """A noise floor that swallows results, or more false alarms than a 95 % interval explains."""
    floor = results.noise_floor
    if floor > _NOISY:
        title = f"The machine was noisy: the baseline against itself is off by up to {text.percent(floor)}"
        return Notice(Tone.WARN, title, ("Repeat on an idle machine before believing anything smaller.",))
    control = results.control
    alarms = [c for c in control if c.verdict in (Verdict.FASTER, Verdict.SLOWER)]
    if len(alarms) <= max(1.0, 0.05 * len(control)):
        return None
    lines = [text.clean(f"{c.name}/{c.dtype}: {text.interval(c.ci_low, c.ci_high)}") for c in alarms]
    return Notice(
        Tone.WARN,
        f"The A/A control called {text.plural(len(alarms), 'case')} different from itself: a noisy machine",
        _limited(lines),
    )


def _flagged(results: Results) -> Notice | None:
    flagged = sum(comparison.flagged_blocks for comparison in results.cases)
    if not flagged:
        return None
    left_out = sum(comparison.left_out for comparison in results.cases)
    blocks = sum(comparison.measured_blocks for comparison in results.cases)
    tone = Tone.WARN if flagged > _NOISY * blocks else Tone.NEUTRAL
    kinds = dict.fromkeys(kind for comparison in results.cases for kind in comparison.disturbances)
    which = f" ({', '.join(kinds)})" if kinds else ""
    title = f"{flagged:,} of {text.plural(blocks, 'paired block')} saw a disturbance{which}"
    return Notice(tone, title + (f"; {left_out:,} left out" if left_out else ""))


def not_measured(view: View) -> tuple[str, ...]:
    """What this run says nothing about."""
    plan, results = view.run.plan, view.run.results
    gaps = [
        "Any other machine: both sides of every ratio were measured on this one.",
        "Run-to-run variation: this is one process; the intervals cover the variation inside it.",
        "Compile time: kernels are built before timing and their build times are listed apart.",
        "Power and energy.",
    ]
    if not definition(plan.operation).differentiates:
        gaps.insert(2, "Backward passes: only the forward call is timed.")
    if plan.device == "cpu" and "AMD" in view.run.machine.summary:
        gaps.insert(
            1,
            "Other makes of processor: on AMD, PyTorch's CPU matrix product runs an AVX2-class kernel, so "
            "the baseline may be weaker here than where it uses AVX-512 or AMX.",
        )
    if not plan.control:
        gaps.append("The noise floor: the run had no A/A control.")
    if results is not None and not results.peaks:
        gaps.append("The share of the machine's peak: no ceilings were measured.")
    if view.run.samples and all(math.isnan(sample.memory_mb) for sample in view.run.samples):
        gaps.append("Memory use.")
    dtypes = set(view.dtypes)
    absent = [dtype for dtype in ("fp16", "bf16", "fp32") if dtype not in dtypes]
    if absent:
        gaps.append(f"{' and '.join(absent)}: not in this plan.")
    return tuple(gaps)


def _limited(lines: list[str]) -> tuple[str, ...]:
    if len(lines) <= _MOST_LINES:
        return tuple(lines)
    return (*lines[: _MOST_LINES - 1], f"and {len(lines) - _MOST_LINES + 1} more")
