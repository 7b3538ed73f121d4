"""The speed-up of each case, as a picture."""

from __future__ import annotations

from typing import Any

from cudadent42.stages.report import keys
from cudadent42.stages.report.figures import drawn
from cudadent42.stages.report.figures.speedup import speedup
from cudadent42.stages.report.section import Section
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View

_HTML = """
<p>Latency of {{ view.baseline }} over that of {{ view.candidate }} within each block, and the middle of these ratios; right of 1 is faster. The bar through each mark is the
95&nbsp;% bootstrap interval, the strip around 1 the margin of ±{{ margin }} inside which a case counts as equal.</p>
<figure>
{{ wide }}
{{ narrow }}
<figcaption><ul class="key">
{% for item in speedup_key %}<li>{{ item.mark }}{{ item.label }}</li>{% endfor %}
</ul></figcaption>
</figure>
"""


def _filled(view: View, sheet: Sheet) -> dict[str, Any] | None:
    if not view.timed:
        return None
    picture = drawn(speedup, view, sheet) if view.measured else {"wide": "", "narrow": ""}
    return {**picture, "speedup_key": keys.speedup_key(view)}


SECTION = Section("speedup", "Speed-up per case", _HTML, _filled, long=False)
