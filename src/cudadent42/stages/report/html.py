"""``report.html``: one file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from cudadent42.model import text
from cudadent42.model.records import VerifiedCase
from cudadent42.stages.report import facts, gates, keys, notices, pages, profile, script, svg
from cudadent42.stages.report.cases import CaseRow, shares_of_bound
from cudadent42.stages.report.figures.control import control
from cudadent42.stages.report.figures.errors import errors
from cudadent42.stages.report.figures.roofline import roofline
from cudadent42.stages.report.figures.samples import Strips, strips
from cudadent42.stages.report.figures.speedup import speedup
from cudadent42.stages.report.rivals import standings
from cudadent42.stages.report.view import View


@dataclass(frozen=True)
class Tile:
    """One figure at the top of the page."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True)
class _Group:
    rows: list[dict[str, Any]]
    mean: str


def render(view: View) -> str:
    """The page."""
    manifest, plan = view.run.manifest, view.run.plan
    samples = strips(view)
    sheet = svg.Sheet()
    figures = _figures(view, sheet)
    cards = _cards(view, samples, sheet)
    profiled = profile.section(view.profiled, sheet) if view.profiled else None
    judged = gates.gate_report(view)
    return (
        pages.environment()
        .get_template("report.html.j2")
        .render(
            view=view,
            version=manifest.version,
            suite=text.clean(plan.suite),
            css=pages.style(sheet),
            contents=[],
            headline=_headline(view),
            notices=notices.notices(view),
            tiles=_tiles(view),
            tally=[
                {"word": v.value, "count": n}
                for v, n in sorted(view.verdicts.items(), key=lambda item: -item[1])
            ],
            case_count=text.plural(len(view.rows), "case"),
            margin=text.percent(plan.margin),
            figure=figures,
            speedup_key=keys.speedup_key(view),
            blocks=_blocks(view),
            flagged=any(row.comparison and row.comparison.flagged_blocks for row in view.rows),
            groups=[(text.clean(dtype), _group(view, dtype)) for dtype in view.dtypes],
            rivals=_rivals(view),
            rivals_line=facts.rivals_line(view.run.results, view.candidate_name),
            gate_line=gates.headline(judged) if judged else "",
            gate_rows=gates.rows(judged) if judged else [],
            script=script.section(view),
            cards=cards,
            sample_line=_sample_line(view, samples),
            lane_key=keys.lane_key(view, samples),
            control_line=facts.control_line(view),
            profile=profiled,
            roofline_line=facts.roofline_line(view),
            roofline_key=keys.roofline_key(view),
            error_key=keys.error_key(view),
            checks=[_check(c) for c in sorted(view.checked, key=lambda check: check.passed)],
            kernels=facts.kernels(view),
            resources=any(k.resources for k in view.run.build.kernels) if view.run.build else False,
            summary=text.clean(view.run.machine.summary),
            run_facts=facts.run_facts(view),
            machine_facts=facts.machine_facts(view),
            preflight=view.run.machine.checks,
            not_measured=notices.not_measured(view),
            reproduce=facts.reproduce(view),
            reproduce_note=facts.reproduce_note(view),
        )
    )


def _figures(view: View, sheet: svg.Sheet) -> dict[str, Markup]:
    """Every picture in its two widths. The figures escape what they write."""
    drawn = {}
    for name, draw in (
        ("speedup", speedup),
        ("control", control),
        ("roofline", roofline),
        ("errors", errors),
    ):
        wanted = name != "speedup" or bool(view.measured)
        drawn[f"{name}_wide"] = Markup(draw(view, sheet, wide=True) if wanted else "")
        drawn[f"{name}_narrow"] = Markup(draw(view, sheet, wide=False) if wanted else "")
    return drawn


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


def _cards(view: View, samples: Strips, sheet: svg.Sheet) -> list[dict[str, Any]]:
    cards = []
    for number, row in enumerate(view.rows):
        picture = samples.panel(row, number, sheet)
        if picture:
            speed = text.ratio(row.comparison.speedup) if row.comparison else "not compared"
            cards.append(
                {"name": row.name, "dtype": row.case.dtype, "speedup": speed, "picture": Markup(picture)}
            )
    return cards


def _sample_line(view: View, samples: Strips) -> str:
    line = f"{text.plural(len(view.run.samples), 'sample')}."
    if samples.stride > 1:
        line += f" One block in {samples.stride} is drawn; samples.csv has all."
    return line


def _check(check: VerifiedCase) -> dict[str, Any]:
    shares = [share for share in shares_of_bound(check) if not math.isnan(share)]
    return {
        "case": text.clean(check.case),
        "input": text.clean(check.input),
        "implementation": text.implementation(check.implementation),
        "passed": check.passed,
        "max": text.scientific(check.error.max) if check.error else "",
        "rms": text.scientific(check.error.rms) if check.error else "",
        "reference": text.scientific(check.reference_error.rms) if check.reference_error else "",
        "share": f"{text.figures(100 * max(shares))} %" if shares else "",
        "detail": text.clean(check.detail),
    }
