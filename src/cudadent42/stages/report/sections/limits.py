"""What nothing here says anything about."""

from __future__ import annotations

from typing import Any

from cudadent42.stages.report import notices
from cudadent42.stages.report.escaping import escape
from cudadent42.stages.report.section import Section, Text
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View

_HTML = """
<ul class="plain">{% for line in not_measured %}<li>{{ line }}</li>{% endfor %}</ul>
"""


def _filled(view: View, sheet: Sheet) -> dict[str, Any]:
    return {"not_measured": notices.not_measured(view)}


def _lines(view: View) -> list[str]:
    return ["\n".join(f"* {escape(line)}" for line in notices.not_measured(view))]


SECTION = Section(
    "not",
    "Not measured here",
    _HTML,
    _filled,
    long=False,
    texts=(Text(150, _lines, fold="Not measured here"),),
)
