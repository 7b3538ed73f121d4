"""The script that the suite was recorded from: what all of it would gain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cudadent42.stages.report.escaping import escape
from cudadent42.stages.report.script import described
from cudadent42.stages.report.section import Section, Text
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View

_HTML = """
{% for line in script.lines %}<p>{{ line }}</p>
{% endfor %}{% if script.stays %}
<div class="scroll" tabindex="0" role="region" aria-labelledby="h-script">
<table id="stays">
<thead><tr><th scope="col">Stays as it is</th><th scope="col">Reason</th><th scope="col" class="n">Calls</th><th scope="col" class="n">Share of the script</th></tr></thead>
<tbody>{% for row in script.stays %}
<tr><th scope="row">{{ row.what }}</th><td class="wrap">{{ row.reason }}</td><td class="n">{{ row.calls }}</td><td class="n">{{ row.share }}</td></tr>
{% endfor %}</tbody></table></div>
{% endif %}{% for note in script.notes %}<p class="note">{{ note }}</p>
{% endfor %}
"""


def _filled(view: View, sheet: Sheet) -> dict[str, Any] | None:
    script = described(view)
    return None if script is None else {"script": script}


def _title(view: View) -> str:
    script = described(view)
    assert script is not None
    return script.title


def _lines(view: View) -> Iterator[str]:
    part = described(view)
    if part is None:
        return
    first, *others = part.lines
    yield f"**{escape(part.title)}.** {escape(first)}"
    yield from map(escape, others)
    if part.stays:
        head = "| stays as it is | reason | calls | share |\n| --- | --- | ---: | ---: |"
        rows = (
            f"| {escape(row.what)} | {escape(row.reason)} | {row.calls} | {row.share} |" for row in part.stays
        )
        yield "\n".join([head, *rows])
    if part.notes:
        yield "\n".join(f"* {escape(note)}" for note in part.notes)


SECTION = Section("script", _title, _HTML, _filled, texts=(Text(25, _lines),))
