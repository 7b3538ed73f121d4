"""The machine, its versions and what preflight said of it."""

from __future__ import annotations

from typing import Any

from cudadent42.model import text
from cudadent42.stages.report import facts
from cudadent42.stages.report.escaping import escape, table
from cudadent42.stages.report.section import Section, Text
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View

_HTML = """
<p><code>{{ summary }}</code></p>
<div class="columns"><div>{{ facts(run_facts) }}</div><div>{{ facts(machine_facts) }}</div></div>
{% if preflight %}
<details><summary>Preflight: {{ preflight|length }} checks</summary>
<div class="scroll" tabindex="0" role="region" aria-label="Preflight checks"><table id="preflight"><thead><tr><th scope="col">Check</th><th scope="col">Status</th><th scope="col">Found</th></tr></thead>
<tbody>{% for check in preflight %}<tr><th scope="row">{{ check.name }}</th><td>{{ check.status.value }}</td><td class="wrap">{{ check.detail }}{% if check.cause %}; {{ check.cause }}{% endif %}{% if check.fix %} Fix: <code>{{ check.fix }}</code>{% endif %}</td></tr>
{% endfor %}</tbody></table></div></details>
{% endif %}
"""


def _filled(view: View, sheet: Sheet) -> dict[str, Any]:
    return {
        "summary": text.clean(view.run.machine.summary),
        "run_facts": facts.run_facts(view),
        "machine_facts": facts.machine_facts(view),
        "preflight": view.run.machine.checks,
    }


def _lines(view: View) -> list[str]:
    rows = facts.run_facts(view) + facts.machine_facts(view)
    return [f"<code>{escape(view.run.machine.summary)}</code>", table(rows)]


SECTION = Section(
    "machine", "Machine and versions", _HTML, _filled, texts=(Text(110, _lines, fold="Machine and versions"),)
)
