"""Every implementation beside the baseline, case by case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cudadent42.model import text
from cudadent42.model.records import Comparison
from cudadent42.stages.report import facts
from cudadent42.stages.report.cases import CaseRow
from cudadent42.stages.report.escaping import escape
from cudadent42.stages.report.rivals import Standing, standings
from cudadent42.stages.report.section import Section, Text
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View

_HTML = """
<p>Speed-up of each over {{ view.baseline }}, in the same blocks, with its 95&nbsp;% interval. The fastest of a case is bold.{% if rivals_line %} {{ rivals_line }}{% endif %}</p>
<div class="scroll" tabindex="0" role="region" aria-labelledby="h-others">
<table id="others">
<thead><tr><th scope="col">Case</th>{% for name in rivals.names %}<th scope="col" class="n">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in rivals.rows %}
<tr><th scope="row" title="{{ row.case }}">{{ row.case }}</th>{% for cell in row.cells %}{% if cell %}<td class="n" title="{{ cell.latency }}, {{ cell.verdict }}"><span class="v-{{ cell.verdict }} {{ cell.fastest }}">{{ cell.speedup }}</span><br><small class="m">{{ cell.interval }}</small></td>{% else %}<td class="n m">not timed</td>{% endif %}{% endfor %}</tr>
{% endfor %}</tbody>
<tfoot>
<tr><th scope="row">Geometric mean</th>{% for mean in rivals.means %}<td class="n lead">{{ mean.speedup }}{% if mean.cells %}<br><small class="m">{{ mean.cells }} cases</small>{% endif %}</td>{% endfor %}</tr>
<tr><th scope="row">{{ view.candidate }} over it</th><td class="n m"></td>{% for ratio in rivals.ratios %}<td class="n lead">{{ ratio }}</td>{% endfor %}</tr>
</tfoot></table></div>
<details><summary>Median latencies</summary>
<div class="scroll" tabindex="0" role="region" aria-label="Median latencies of all implementations">
<table id="latencies">
<thead><tr><th scope="col">Case</th>{% for name in rivals.names %}<th scope="col" class="n">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in rivals.rows %}
<tr><th scope="row">{{ row.case }}</th>{% for cell in row.cells %}<td class="n">{% if cell %}{{ cell.latency }}{% endif %}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div></details>
"""


def _filled(view: View, sheet: Sheet) -> dict[str, Any] | None:
    rivals = _rivals(view)
    return None if rivals is None else {"rivals": rivals, "rivals_line": _line(view)}


def _line(view: View) -> str:
    return facts.rivals_line(view.run.results, view.candidate_name)


def _rivals(view: View) -> dict[str, Any] | None:
    """Cases by implementations; None where there is only the candidate."""
    results = view.run.results
    if results is None or not view.other_names:
        return None
    columns = standings(results)
    return {
        "names": [text.implementation(column.implementation) for column in columns],
        "rows": [
            {
                "case": f"{row.name}/{row.case.dtype}",
                "cells": _cells(row, [column.implementation for column in columns], view.candidate_name),
            }
            for row in view.rows
            if row.comparison or row.others
        ],
        "means": [
            {"speedup": text.ratio(column.speedup), "cells": _of_all(column.cells, len(view.rows))}
            for column in columns
        ],
        "ratios": [text.ratio(column.ratio) for column in columns[1:]],
    }


def _cells(row: CaseRow, names: Sequence[str], candidate: str) -> list[dict[str, str] | None]:
    """What each implementation reached on a case; None where it was not timed."""
    timed = [row.comparison if name == candidate else row.others.get(name) for name in names]
    fastest = min((each.latency_ms for each in timed if each is not None), default=math.nan)
    return [
        {
            "speedup": text.ratio(each.speedup),
            "interval": text.interval(each.ci_low, each.ci_high),
            "latency": text.latency(each.latency_ms),
            "verdict": each.verdict.value,
            "fastest": "lead" if each.latency_ms == fastest else "",
        }
        if each is not None
        else None
        for each in timed
    ]


def _of_all(count: int, all_: int) -> str:
    return "" if count == all_ else f"{count} of {all_}"


def _table(view: View) -> list[str]:
    """Speed-ups over the baseline, a row a case and a column an implementation, with their means."""
    results = view.run.results
    if results is None or not view.other_names:
        return []
    columns = standings(results)
    names = [column.implementation for column in columns]
    head = [
        f"| speed-up over {escape(view.baseline)} | "
        + " | ".join(escape(text.implementation(name)) for name in names)
        + " |",
        "| --- |" + " ---: |" * len(names),
    ]
    lines = []
    for row in view.rows:
        timed = [row.comparison if name == view.candidate_name else row.others.get(name) for name in names]
        if any(timed):
            cells = " | ".join(_reached(each) for each in timed)
            lines.append(f"| {escape(row.name)}/{escape(row.case.dtype)} | {cells} |")
    means = " | ".join(_mean(column, len(view.rows)) for column in columns)
    ratios = " | ".join(text.ratio(column.ratio) for column in columns[1:])
    lines.append(f"| **geometric mean** | {means} |")
    lines.append(f"| **{escape(view.candidate)} over it** | | {ratios} |")
    return ["\n".join([*head, *lines])]


def _reached(comparison: Comparison | None) -> str:
    if comparison is None:
        return "not timed"
    interval = text.interval(comparison.ci_low, comparison.ci_high)
    return f"**{text.ratio(comparison.speedup)}** {comparison.verdict.value} ({interval})"


def _mean(standing: Standing, cases: int) -> str:
    mean = f"**{text.ratio(standing.speedup)}**"
    return mean if standing.cells == cases else f"{mean} ({standing.cells} of {cases})"


SECTION = Section(
    "others",
    "All implementations",
    _HTML,
    _filled,
    texts=(Text(40, lambda view: [escape(_line(view))]), Text(130, _table, fold="All implementations")),
)
