"""The baseline against itself: how far apart two that are equal are measured."""

from __future__ import annotations

from typing import Any

from cudadent42.stages.report import facts
from cudadent42.stages.report.escaping import escape
from cudadent42.stages.report.figures import drawn
from cudadent42.stages.report.figures.control import control
from cudadent42.stages.report.section import Section, Text
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View

_HTML = """
<p>The same call, measured twice in every block as if it were two implementations. {{ control_line }}</p>
<figure>{{ wide }}{{ narrow }}
<figcaption>One mark per case with its 95 % interval. Strip: the margin of ±{{ margin }}. Dashed: the noise floor.</figcaption></figure>
"""


def _filled(view: View, sheet: Sheet) -> dict[str, Any] | None:
    picture = drawn(control, view, sheet)
    return {**picture, "control_line": facts.control_line(view)} if picture["wide"] else None


SECTION = Section(
    "control",
    lambda view: f"Noise floor: {view.baseline} against itself",
    _HTML,
    _filled,
    long=False,
    texts=(Text(60, lambda view: [escape(facts.control_line(view))]),),
)
