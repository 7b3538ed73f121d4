"""How far each case is from what the machine could do."""

from __future__ import annotations

from typing import Any

from cudadent42.stages.report import facts, keys
from cudadent42.stages.report.escaping import escape
from cudadent42.stages.report.figures import drawn
from cudadent42.stages.report.figures.roofline import roofline
from cudadent42.stages.report.section import Section, Text
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View

_HTML = """
<p>{{ roofline_line }}</p>
<figure>{{ wide }}{{ narrow }}
<figcaption><ul class="key">{% for item in roofline_key %}<li>{{ item.mark }}{{ item.label }}</li>{% endfor %}</ul>
A name that would overlap another mark is left out. The table of cases holds every rate.</figcaption></figure>
"""


def _filled(view: View, sheet: Sheet) -> dict[str, Any] | None:
    picture = drawn(roofline, view, sheet)
    if not picture["wide"]:
        return None
    line, key = facts.roofline_line(view), keys.roofline_key(view)
    return {**picture, "roofline_line": line, "roofline_key": key}


SECTION = Section(
    "roofline",
    "Roofline",
    _HTML,
    _filled,
    long=False,
    texts=(Text(70, lambda view: [escape(facts.roofline_line(view))]),),
)
