"""``report.html``: one file that needs nothing else."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, Template
from markupsafe import Markup, escape

from cudadent42.model import text
from cudadent42.stages.report import notices, pages, svg
from cudadent42.stages.report.section import Section
from cudadent42.stages.report.sections import SECTIONS
from cudadent42.stages.report.view import View

_MACROS = '{% from "parts.html.j2" import facts, verdict %}'


@dataclass(frozen=True)
class Tile:
    """One figure at the top of the page."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True)
class Shown:
    """A section that applies, as the page shows it."""

    name: str
    title: str
    long: bool
    body: Markup


def render(view: View) -> str:
    """The page."""
    sheet = svg.Sheet()
    shown = [
        Shown(section.name, section.title_of(view), section.long, _body(section, filled, view))
        for section in SECTIONS
        if (filled := _filled(section, view, sheet)) is not None
    ]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            view=view,
            version=view.run.manifest.version,
            suite=text.clean(view.run.plan.suite),
            css=pages.style(sheet),
            contents=[(f"h-{each.name}", each.title) for each in shown],
            sections=shown,
            headline=_headline(view),
            notices=notices.notices(view),
            tiles=_tiles(view),
            tally=[
                {"word": v.value, "count": n}
                for v, n in sorted(view.verdicts.items(), key=lambda item: -item[1])
            ],
            case_count=text.plural(len(view.rows), "case"),
        )
    )


@functools.cache
def _environment() -> Environment:
    return pages.environment()


@functools.cache
def _template(html: str) -> Template:
    return _environment().from_string(_MACROS + html)


def _filled(section: Section, view: View, sheet: svg.Sheet) -> Mapping[str, Any] | None:
    """Without looks for garbage while it draws, which take a fifth of the time: pictures are many objects."""
    looked = gc.isenabled()
    gc.disable()
    try:
        return section.filled(view, sheet)
    finally:
        if looked:
            gc.enable()


def _body(section: Section, filled: Mapping[str, Any], view: View) -> Markup:
    """What stands below its title."""
    template = _template(section.html)
    return Markup(template.render(view=view, margin=text.percent(view.run.plan.margin), **filled))


def _headline(view: View) -> Markup:
    """The verdict with its number set apart."""
    words, colon, number = view.headline.rpartition(": ")
    if colon and number.endswith("×"):
        return escape(words) + ": " + Markup("<b>") + number + Markup("</b>")
    return escape(view.headline)


def _tiles(view: View) -> list[Tile]:
    results = view.run.results
    tiles = []
    if view.extremes and len(view.timed) > 1:
        low, high = view.extremes
        if low.comparison and high.comparison:
            tiles.append(
                Tile("Slowest case", text.ratio(low.comparison.speedup), f"{low.name} {low.case.dtype}")
            )
            tiles.append(
                Tile("Fastest case", text.ratio(high.comparison.speedup), f"{high.name} {high.case.dtype}")
            )
    if results and view.timed and math.isfinite(results.noise_floor):
        tiles.append(
            Tile("Noise floor", f"±{text.percent(results.noise_floor)}", "A/A control, 95th percentile")
        )
    if view.checked:
        passed = sum(check.passed for check in view.checked)
        worst = view.worst_of_bound
        tiles.append(
            Tile(
                "Checks passed",
                f"{passed:,} of {len(view.checked):,}",
                f"worst error {text.figures(100 * worst)} % of its bound" if math.isfinite(worst) else "",
            )
        )
    return tiles
