"""The report's section about a profile: the ranked causes, the pictures, what is wanted of every kernel."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from markupsafe import Markup

from cudadent42.model import text
from cudadent42.profiles import compare, store
from cudadent42.profiles.diagnosis import shown
from cudadent42.profiles.records import Finding, Profile, Threshold
from cudadent42.profiles.text import ablations, basis, known, times, unasked
from cudadent42.stages.report import keys, svg
from cudadent42.stages.report.figures.profile import roofline, stalls
from cudadent42.stages.report.view import Profiled


def load_profiled(folder: Path, before: Path | None) -> Profiled | None:
    """The folder's profile with its diagnosis, and the profile of the folder ``before``; None where it has none.

    Raises UsageError for files that cannot be understood, and where ``before`` has no profile.
    """
    profile, diagnosis = store.load_profile(folder), store.load_diagnosis(folder)
    if profile is None or diagnosis is None:
        return None
    return Profiled(profile, diagnosis, compare.load(before) if before is not None else None)


def section(view: Profiled, sheet: svg.Sheet) -> dict[str, Any]:
    """What the page's template fills in."""
    profile, diagnosis = view.profile, view.diagnosis
    drawn = {
        f"{name}_{size}": Markup(draw(view, sheet, wide=size == "wide"))
        for name, draw in (("roofline", roofline), ("stalls", stalls))
        for size in ("wide", "narrow")
    }
    subject = f"{text.clean(profile.case)}, {text.implementation(profile.implementation)}"
    kernel = f" Kernel: {text.clean(profile.kernel)}." if profile.kernel else ""
    return {
        **drawn,
        "subject": subject,
        "summary": f"{diagnosis.summary}{kernel} By {basis(diagnosis)}.",
        "unasked": unasked(diagnosis),
        "times": [f"{line[0].upper()}{line[1:]}." for line in (*times(diagnosis), *ablations(diagnosis))],
        "causes": [_cause(finding) for finding in diagnosis.causes],
        "limits": [f"{one.title}: {one.evidence}. {one.meaning}" for one in diagnosis.limits],
        "next_step": diagnosis.next_step,
        "roofline_key": keys.profile_key(view),
        "stalls_key": keys.bar_key(view),
        "changes": compare.changes(view.before, profile) if view.before is not None else (),
        "thresholds": [_threshold(one) for one in diagnosis.thresholds],
        "compiled": _compiled(profile),
        "notes": [text.clean(note) for note in diagnosis.notes],
    }


def _cause(finding: Finding) -> dict[str, str]:
    return {
        "title": finding.title,
        "gain": f"{100 * finding.gain:.0f} %",
        "known": known(finding),
        "evidence": finding.evidence,
        "experiment": finding.experiment,
    }


def _compiled(profile: Profile) -> str:
    """Registers, spills and instructions of the compiled kernel in a sentence; empty where it was not looked into."""
    table, counts = profile.resources, profile.instructions
    if table is None:
        return ""
    spilled = table.spill_load_bytes + table.spill_store_bytes
    words = (
        f"The compiled kernel: {table.registers_per_thread} registers per thread, {spilled} bytes spilled, "
        f"{table.static_shared_bytes + table.dynamic_shared_bytes:,} bytes of shared memory per block"
    )
    kinds = [f"{name.replace('_', ' ')} {number:,}" for name, number in counts.items() if number]
    return f"{words}. Instructions in it, by kind: {', '.join(kinds)}." if kinds else f"{words}."


def _threshold(one: Threshold) -> dict[str, str]:
    return {
        "name": one.name,
        "value": shown(one.value, "%") if math.isfinite(one.value) else text.NOT_AVAILABLE,
        "wanted": one.wanted,
        "result": {True: "met", False: "missed", None: one.note}[one.met],
    }
