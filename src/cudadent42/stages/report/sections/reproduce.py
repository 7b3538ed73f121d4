"""The commands that repeat the run."""

from __future__ import annotations

from typing import Any

from cudadent42.stages.report import facts
from cudadent42.stages.report.escaping import commands, escape
from cudadent42.stages.report.section import Section, Text
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View

_HTML = """
<pre>{{ reproduce }}</pre>
<p class="note">{{ reproduce_note }}</p>
"""


def _filled(view: View, sheet: Sheet) -> dict[str, Any]:
    return {"reproduce": facts.reproduce(view), "reproduce_note": facts.reproduce_note(view)}


def _lines(view: View) -> list[str]:
    return [commands(facts.reproduce(view)), escape(facts.reproduce_note(view))]


SECTION = Section(
    "reproduce", "Reproduce", _HTML, _filled, long=False, texts=(Text(160, _lines, fold="Reproduce"),)
)
