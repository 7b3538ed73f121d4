"""Every sample, a panel for each case."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from cudadent42.model import text
from cudadent42.stages.report import keys
from cudadent42.stages.report.figures.samples import Strips, strips
from cudadent42.stages.report.section import Section
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View

_HTML = """
<p>{{ sample_line }} Each dot is one timed call, placed by its distance from the median of its row: about linear up to
1&nbsp;%, logarithmic beyond, the same in every panel. Earlier blocks lie higher, so a slant is a drift. The medians are at the
right.</p>
<ul class="key">{% for item in lane_key %}<li>{{ item.mark }}{{ item.label }}</li>{% endfor %}</ul>
<div class="cards">
{% for card in cards %}
<figure><figcaption><span>{{ card.name }} <span class="m">{{ card.dtype }}</span></span><b>{{ card.speedup }}</b></figcaption>{{ card.picture }}</figure>
{% endfor %}
</div>
"""


def _filled(view: View, sheet: Sheet) -> dict[str, Any] | None:
    samples = strips(view)
    cards = _cards(view, samples, sheet)
    if not cards:
        return None
    return {"cards": cards, "sample_line": _line(view, samples), "lane_key": keys.lane_key(view, samples)}


def _cards(view: View, samples: Strips, sheet: Sheet) -> list[dict[str, Any]]:
    cards = []
    for number, row in enumerate(view.rows):
        picture = samples.panel(row, number, sheet)
        if picture:
            speed = text.ratio(row.comparison.speedup) if row.comparison else "not compared"
            cards.append(
                {"name": row.name, "dtype": row.case.dtype, "speedup": speed, "picture": Markup(picture)}
            )
    return cards


def _line(view: View, samples: Strips) -> str:
    line = f"{text.plural(len(view.run.samples), 'sample')}."
    if samples.stride > 1:
        line += f" One block in {samples.stride} is drawn; samples.csv has all."
    return line


SECTION = Section("samples", "The samples", _HTML, _filled)
