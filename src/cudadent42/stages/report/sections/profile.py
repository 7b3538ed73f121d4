"""Where the time of one case goes: the ranked causes, the pictures, what is wanted of every kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from cudadent42.model import text
from cudadent42.profiles import compare
from cudadent42.profiles.diagnosis import shown
from cudadent42.profiles.records import Finding, Profile, Threshold
from cudadent42.profiles.text import ablations, basis, certainty_words, times, unasked
from cudadent42.stages.report import keys
from cudadent42.stages.report.escaping import escape
from cudadent42.stages.report.figures.profile import roofline, stalls
from cudadent42.stages.report.section import Section, Text
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import Profiled, View

_HTML = """
<p>{{ profile.summary }}</p>
{% if profile.unasked %}<p>{{ profile.unasked }}.</p>{% endif %}
{% for line in profile.times %}<p class="note">{{ line }}</p>
{% endfor %}{% if profile.causes %}
<div class="scroll" tabindex="0" role="region" aria-labelledby="h-profile">
<table id="causes">
<thead><tr><th scope="col">Cause</th><th scope="col" class="n">At most</th><th scope="col">Known</th><th scope="col">Evidence</th><th scope="col">Try first</th></tr></thead>
<tbody>{% for cause in profile.causes %}
<tr><th scope="row" class="wrap">{{ cause.title }}</th><td class="n lead">{{ cause.gain }}</td><td class="wrap">{{ cause.known }}</td><td class="wrap">{{ cause.evidence }}</td><td class="wrap">{{ cause.experiment }}</td></tr>
{% endfor %}</tbody></table></div>
{% endif %}
{% if profile.limits %}<ul class="plain">{% for line in profile.limits %}<li>{{ line }}</li>{% endfor %}</ul>{% endif %}
<p><strong>Next:</strong> {{ profile.next_step }}</p>
{% if profile.roofline_wide %}
<h3>Roofline of this kernel</h3>
<figure>{{ profile.roofline_wide }}{{ profile.roofline_narrow }}
<figcaption><ul class="key">{% for item in profile.roofline_key %}<li>{{ item.mark }}{{ item.label }}</li>{% endfor %}</ul></figcaption></figure>
{% endif %}
{% if profile.stalls_wide %}
<h3>What warps wait for</h3>
<p class="note">Share of a warp's time between two instructions, by the reason why it does not issue. “issuing” is the cycle in which it does.</p>
<figure>{{ profile.stalls_wide }}{{ profile.stalls_narrow }}
<figcaption><ul class="key">{% for item in profile.stalls_key %}<li>{{ item.mark }}{{ item.label }}</li>{% endfor %}</ul></figcaption></figure>
{% endif %}
{% if profile.changes %}<h3>Against the earlier profile</h3><ul class="plain">{% for line in profile.changes %}<li>{{ line }}</li>{% endfor %}</ul>{% endif %}
{% if profile.thresholds %}<details><summary>Values that are wanted of every kernel</summary>
<div class="scroll" tabindex="0" role="region" aria-label="Thresholds"><table id="thresholds">
<thead><tr><th scope="col">Value</th><th scope="col" class="n">Found</th><th scope="col">Wanted</th><th scope="col">Result</th></tr></thead>
<tbody>{% for one in profile.thresholds %}<tr><th scope="row">{{ one.name }}</th><td class="n">{{ one.value }}</td><td>{{ one.wanted }}</td><td class="wrap">{{ one.result }}</td></tr>
{% endfor %}</tbody></table></div></details>{% endif %}
{% if profile.compiled %}<p class="note">{{ profile.compiled }}</p>{% endif %}
{% if profile.notes %}<ul class="plain note">{% for line in profile.notes %}<li>{{ line }}</li>{% endfor %}</ul>{% endif %}
"""


def _filled(run: View, sheet: Sheet) -> dict[str, Any] | None:
    view = run.profiled
    return None if view is None else {"profile": _profile(view, sheet)}


def _profile(view: Profiled, sheet: Sheet) -> dict[str, Any]:
    profile, diagnosis = view.profile, view.diagnosis
    pictures = {
        f"{name}_{size}": Markup(draw(view, sheet, wide=size == "wide"))
        for name, draw in (("roofline", roofline), ("stalls", stalls))
        for size in ("wide", "narrow")
    }
    kernel = f" Kernel: {text.clean(profile.kernel)}." if profile.kernel else ""
    return {
        **pictures,
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
        "known": certainty_words(finding),
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


def _title(view: View) -> str:
    assert view.profiled is not None
    profile = view.profiled.profile
    subject = f"{text.clean(profile.case)}, {text.implementation(profile.implementation)}"
    return f"Where the time goes: {subject}"


def _lines(view: View) -> Iterator[str]:
    """The ranked causes, and what to do next."""
    if view.profiled is None:
        return
    diagnosis = view.profiled.diagnosis
    subject = f"{text.clean(diagnosis.case)}, {text.implementation(diagnosis.implementation)}"
    yield f"**Where the time goes: {escape(subject)}.** {escape(diagnosis.summary)}"
    if diagnosis.not_examined:
        yield f"{escape(unasked(diagnosis))}."
    yield from (
        f"{escape(line[0].upper() + line[1:])}." for line in (*times(diagnosis), *ablations(diagnosis))
    )
    if diagnosis.causes:
        head = "| cause | at most | known | evidence | try first |\n| --- | ---: | --- | --- | --- |"
        rows = (
            f"| {escape(one.title)} | {100 * one.gain:.0f} % | {certainty_words(one)} "
            f"| {escape(one.evidence)} | {escape(one.experiment)} |"
            for one in diagnosis.causes
        )
        yield "\n".join([head, *rows])
    yield f"Next: {escape(diagnosis.next_step)}"


SECTION = Section("profile", _title, _HTML, _filled, texts=(Text(30, _lines),))
