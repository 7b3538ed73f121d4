"""A diagnosis in lines for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cudadent42.profiles.diagnosis import shown, wants
from cudadent42.profiles.records import Clock, Diagnosis, Finding, Kind, Source
from cudadent42.profiles.times import APART, apart


def lines(diagnosis: Diagnosis, verbose: bool = False) -> Iterator[str]:
    """The verdict, the ranked causes, what to do next; with ``verbose``, all that was looked at."""
    what = f"{diagnosis.case}, {diagnosis.implementation}"
    yield f"{what}: {diagnosis.kernel}" if diagnosis.kernel else what
    yield diagnosis.summary
    if diagnosis.not_examined:
        yield unasked(diagnosis)
    yield from times(diagnosis)
    yield from ablations(diagnosis)
    for number, finding in enumerate(diagnosis.causes, 1):
        yield ""
        yield from _finding(number, finding)
    if diagnosis.limits:
        yield ""
    for finding in diagnosis.limits:
        yield f"limit: {finding.title}: {finding.evidence}. {finding.meaning}"
    if verbose:
        yield from _details(diagnosis)
    missed = [one for one in diagnosis.thresholds if one.met is False]
    if missed:
        yield ""
        yield "values outside of what is wanted: " + "; ".join(
            f"{one.name} {shown(one.value, '%')} (wanted {one.wanted})" for one in missed
        )
    unknown = [one.name for one in diagnosis.thresholds if one.met is None and math.isnan(one.value)]
    if unknown:
        yield ""
        yield "not known, so not shown to be in order: " + ", ".join(unknown)
    if diagnosis.notes:
        yield ""
    for note in diagnosis.notes:
        yield f"note: {note}"
    yield ""
    yield f"next: {diagnosis.next_step}"


def _finding(number: int, finding: Finding) -> Iterator[str]:
    yield f"{number}. {finding.title} ({certainty_words(finding)}): {gain(finding)}"
    yield f"   {finding.evidence}."
    yield f"   {finding.meaning}"
    yield f"   try: {finding.experiment}."


def certainty_words(finding: Finding) -> str:
    """How well it is known, and what of it is not."""
    kind = {Kind.SYMPTOM: ", a symptom", Kind.UNEXPLAINED: ", cause not known"}.get(finding.kind, "")
    return f"{finding.certainty.value}{kind}"


def gain(finding: Finding) -> str:
    """The bound in words."""
    if not math.isfinite(finding.speedup) or finding.speedup > 10:
        return f"at most {finding.gain:.0%} of the time"
    return f"at most {finding.gain:.0%} of the time, {finding.speedup:.2f}x"


def unasked(diagnosis: Diagnosis) -> str:
    """Which part of the rules could not be asked, and why; empty where all were."""
    if not diagnosis.not_examined:
        return ""
    count = f"{len(diagnosis.not_examined)}" + (f" of {diagnosis.rules}" if diagnosis.rules else "")
    return f"{count} rules were not asked: {wants(diagnosis.not_examined)}"


_CLOCKS = {
    Clock.COUNTED: "under Nsight Compute (alone, on a chip that was idle)",
    Clock.TRACED: "in the driver's trace (its kernels, cache warm)",
    Clock.CALLED: "called (the whole call)",
    Clock.ABLATED: "called in the race with its ablations",
    Clock.RUN: "called in the run",
}


_GPU_REASONS = (
    "a call counts its launch and the gaps between kernels, and a chip without pauses lowers its clock"
)
_CPU_REASONS = "other work on the machine, or its clock, has changed between them"


def times(diagnosis: Diagnosis) -> Iterator[str]:
    """A call's times, which is which, and by how much they differ; nothing where none is known."""
    several = len(diagnosis.times) > 1
    if diagnosis.times:
        yield f"time{'s' if several else ''} of a call: " + ", ".join(
            f"{one.latency_ms:.4g} ms {_CLOCKS[one.clock]}"
            f"{', which rates rest on' if several and one.judged else ''}"
            for one in diagnosis.times
        )
    difference = apart(diagnosis.times)
    if difference > APART:
        on_gpu = {one.clock for one in diagnosis.times} & {Clock.COUNTED, Clock.TRACED}
        yield (
            f"careful: these differ by {difference:.0%}; {_GPU_REASONS if on_gpu else _CPU_REASONS}; "
            "compare only times of one kind"
        )


def ablations(diagnosis: Diagnosis) -> Iterator[str]:
    """What leaving out each part saves; nothing where none was left out."""
    if diagnosis.ablations:
        yield "without a part of its work, share of the time that goes away (95 % interval): " + ", ".join(
            f"{one.part} {_share(one.saved)} ({_share(one.saved_low)} to {_share(one.saved_high)})"
            for one in diagnosis.ablations
        )


def _share(value: float) -> str:
    """In percent, without a sign before a zero."""
    return f"{round(value, 3) + 0.0:.1%}"


def _details(diagnosis: Diagnosis) -> Iterator[str]:
    yield ""
    for one in diagnosis.thresholds:
        word = {True: "ok", False: "missed", None: one.note}[one.met]
        value = shown(one.value, "%") if math.isfinite(one.value) else "–"
        yield f"{one.name:36}{value:>8}  wanted {one.wanted:7}  {word}"
    for finding in diagnosis.minor:
        yield f"small: {finding.title}: {finding.evidence}; {gain(finding)}"
    for rule, reason in diagnosis.not_examined.items():
        yield f"not looked at: {rule}: {reason}"


def basis(diagnosis: Diagnosis) -> str:
    """What the verdict rests on, in a phrase."""
    if diagnosis.source is Source.COUNTERS:
        return "performance counters of one launch"
    return "times, measured ceilings and the compiled kernel, without performance counters"
