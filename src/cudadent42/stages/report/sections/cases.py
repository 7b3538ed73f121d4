"""Every case in a table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cudadent42.model import text
from cudadent42.model.records import Verdict
from cudadent42.stages.report.cases import CaseRow
from cudadent42.stages.report.escaping import escape
from cudadent42.stages.report.section import Section, Text
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View

_HTML = """
<p class="note" id="d-cases">Latencies are medians per call{% if blocks %} over {{ blocks }}{% endif %}. Shape is {{ view.shape_legend }}. Error is the worst element's, as a multiple of PyTorch's own.</p>
<div class="scroll" tabindex="0" role="region" aria-labelledby="h-cases">
<table id="cases" aria-describedby="d-cases">
<thead><tr><th scope="col">Case</th><th scope="col" class="shape">Shape</th><th scope="col" class="n">Speed-up</th><th scope="col">95 % interval</th><th scope="col">Verdict</th><th scope="col" class="n">{{ view.baseline }}</th><th scope="col" class="n">{{ view.candidate }}</th><th scope="col" class="n">GFLOP/s</th><th scope="col" class="n">Error</th>{% if flagged %}<th scope="col" class="n"><abbr title="Paired blocks that saw a disturbance">Flagged</abbr></th>{% endif %}</tr></thead>
{% for dtype, rows in groups %}
<tbody class="group">
<tr><th scope="rowgroup" colspan="{{ 10 if flagged else 9 }}">{{ dtype }}{% if rows.mean %} <span class="m">geometric mean {{ rows.mean }}</span>{% endif %}</th></tr>
{% for row in rows.rows %}
<tr><th scope="row" title="{{ row.name }}" data-shape="{{ row.shape }}">{{ row.name }}</th><td class="shape">{{ row.shape }}</td>
{%- if row.timed %}<td class="n lead">{{ row.speedup }}</td><td>{{ row.interval }}</td><td>{{ verdict(row.verdict) }}</td><td class="n">{{ row.baseline_latency }}</td><td class="n">{{ row.latency }}</td><td class="n">{{ row.gflops }}</td><td class="n">{{ row.error }}</td>{% if flagged %}<td class="n">{{ row.flagged }}</td>{% endif %}
{%- else %}<td colspan="{{ 8 if flagged else 7 }}" class="wrap m">Not compared: {{ row.reason }}</td>{% endif %}</tr>
{% endfor %}
</tbody>
{% endfor %}
</table></div>
"""


@dataclass(frozen=True)
class _Group:
    rows: list[dict[str, Any]]
    mean: str


def _filled(view: View, sheet: Sheet) -> dict[str, Any] | None:
    if view.profile_alone:
        return None
    return {
        "blocks": _blocks(view),
        "flagged": any(row.comparison and row.comparison.flagged_blocks for row in view.rows),
        "groups": [(text.clean(dtype), _group(view, dtype)) for dtype in view.dtypes],
    }


def _blocks(view: View) -> str:
    """Paired blocks per case, as one number or a range."""
    counts = sorted({row.comparison.blocks for row in view.timed if row.comparison})
    if not counts:
        return ""
    return (
        text.plural(counts[0], "paired block")
        if len(counts) == 1
        else f"{counts[0]} to {counts[-1]} paired blocks"
    )


def _group(view: View, dtype: str) -> _Group:
    mean = view.dtype_geomean(dtype)
    return _Group(
        rows=[_case(row) for row in view.rows if row.case.dtype == dtype],
        mean="" if math.isnan(mean) else text.ratio(mean),
    )


def _case(row: CaseRow) -> dict[str, Any]:
    cells: dict[str, Any] = {"name": row.name, "shape": row.shape, "timed": False}
    comparison = row.comparison
    if comparison is None:
        return {**cells, "reason": row.reason}
    error = row.error_over_reference
    return {
        **cells,
        "timed": True,
        "baseline_latency": text.latency(comparison.baseline_latency_ms),
        "latency": text.latency(comparison.latency_ms),
        "speedup": text.ratio(comparison.speedup) if row.measured else text.NOT_AVAILABLE,
        "interval": f"no ratio: {comparison.refused.value}"
        if comparison.refused
        else text.interval(comparison.ci_low, comparison.ci_high),
        "verdict": comparison.verdict.value,
        "gflops": text.figures(row.gflops) if row.measured else text.NOT_AVAILABLE,
        "error": f"{error:.2f}×" if math.isfinite(error) else text.NOT_AVAILABLE,
        "flagged": f"{comparison.flagged_blocks} of {comparison.measured_blocks}",
    }


def _table(view: View) -> Iterator[str]:
    if view.profile_alone:
        return
    head = (
        f"| case | dtype | {escape(view.baseline)} | {escape(view.candidate)} "
        "| speed-up | 95 % interval | verdict |\n"
        "| --- | --- | ---: | ---: | ---: | --- | --- |"
    )
    yield "\n".join([head, *(_line(row) for row in view.rows)])


def _line(row: CaseRow) -> str:
    start = f"| {escape(row.name)} | {escape(row.case.dtype)} |"
    comparison = row.comparison
    if comparison is None:
        return f"{start} | | | | not compared: {escape(row.reason)} |"
    flagged = f" ({comparison.flagged_blocks} flagged)" if comparison.flagged_blocks else ""
    latencies = f"{text.latency(comparison.baseline_latency_ms)} | {text.latency(comparison.latency_ms)}"
    if comparison.refused is not None:
        return f"{start} {latencies} | | | no verdict: {comparison.refused.value}{flagged} |"
    ratio = text.ratio(comparison.speedup)
    ratio = ratio if comparison.verdict is Verdict.UNDECIDED else f"**{ratio}**"
    return (
        f"{start} {latencies} | {ratio} | {text.interval(comparison.ci_low, comparison.ci_high)} | "
        f"{comparison.verdict.value}{flagged} |"
    )


SECTION = Section("cases", "Every case", _HTML, _filled, texts=(Text(10, _table),))
