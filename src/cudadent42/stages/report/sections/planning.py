"""What is planned once a step, beside the calls that are compared without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cudadent42.stages.report.escaping import escape
from cudadent42.stages.report.planning import HEADS, planning_lines, plannings
from cudadent42.stages.report.section import Section, Text
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View

_HTML = """
{% for line in planning.lines %}<p>{{ line }}</p>
{% endfor %}
<div class="scroll" tabindex="0" role="region" aria-labelledby="h-planning">
<table id="plannings">
<thead><tr>{% for head in planning.heads %}<th scope="col"{% if loop.index > 2 %} class="n"{% endif %}>{{ head }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in planning.rows %}
<tr><th scope="row">{{ row[0] }}</th><td>{{ row[1] }}</td>{% for cell in row[2:] %}<td class="n">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
"""


def _filled(view: View, sheet: Sheet) -> dict[str, Any] | None:
    timed = plannings(view.run.results)
    if not timed:
        return None
    lines = list(planning_lines(view.run.results))
    return {"planning": {"lines": lines, "heads": HEADS, "rows": [each.cells for each in timed]}}


def _lines(view: View) -> Iterator[str]:
    return map(escape, planning_lines(view.run.results))


def _table(view: View) -> Iterator[str]:
    timed = plannings(view.run.results)
    if timed:
        rows = (" | ".join(map(escape, each.cells)) for each in timed)
        yield "\n".join(
            [
                f"| {' | '.join(HEADS)} |",
                "| --- | --- | ---: | ---: | ---: |",
                *(f"| {row} |" for row in rows),
            ]
        )


SECTION = Section(
    "planning",
    "Planning",
    _HTML,
    _filled,
    texts=(Text(45, _lines), Text(135, _table, fold="Planning")),
)
