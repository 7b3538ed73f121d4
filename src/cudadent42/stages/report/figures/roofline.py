"""Roofline: rate against intensity under measured peaks (Williams, Waterman, Patterson, CACM 52(4), 2009)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from cudadent42.stages.report import svg, text
from cudadent42.stages.report.cases import CaseRow
from cudadent42.stages.report.figures import marks
from cudadent42.stages.report.svg import Role
from cudadent42.stages.report.view import View

_HEAD = 26.0
_LEFT = 50.0
_GAP = 28.0
_FOOT = 46.0
_THOUSANDS_FROM = 1e5


@dataclass(frozen=True)
class Frame:
    """Limits that all panels share, and how many ticks fit."""

    intensity: tuple[float, float]
    rate: tuple[float, float]
    ticks: int


def roofline(view: View, sheet: svg.Sheet, *, wide: bool) -> str:
    """A panel per dtype with its cases, baseline and candidate joined; empty where nothing was timed."""
    rows = [row for row in view.timed if _drawable(row)]
    if not rows:
        return ""
    dtypes = list(dict.fromkeys(row.case.dtype for row in rows))
    columns = min(len(dtypes), 3) if wide else 1
    lines = math.ceil(len(dtypes) / columns)
    width, height = (1040.0, 330.0) if wide else (360.0, 260.0)
    panel_width = (width - 8 - columns * _LEFT - (columns - 1) * _GAP) / columns
    pitch = _HEAD + height + _FOOT
    fig = svg.figure(width, lines * pitch)
    frame = _frame(view, rows, 10 // columns if wide else 5)
    tips: dict[int, str] = {}
    for number, dtype in enumerate(dtypes):
        line, column = divmod(number, columns)
        left = _LEFT + column * (panel_width + _LEFT + _GAP)
        axes = svg.panel(fig, left, line * pitch + _HEAD, panel_width, height)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_axis_off()
        axes.set_xlim(*frame.intensity)
        axes.set_ylim(*frame.rate)
        marks.write(
            axes, 0, 1 + 14 / height, text.clean(dtype), role=Role.INK, size=13, bold=True, place="axes"
        )
        draw_grid(axes, frame, height)
        draw_ceilings(axes, frame, view.peak(dtype), view.bandwidth)
        for row in rows:
            if row.case.dtype == dtype:
                _case(axes, view, row, tips)
    return svg.render(
        fig,
        prefix=f"roofline-{'wide' if wide else 'narrow'}",
        title="Roofline: achieved GFLOP/s against floating-point operations per byte",
        description="Every timed case, the baseline's rate joined to the candidate's.",
        sheet=sheet,
        tips=tips if wide else None,
        css_class="wide" if wide else "narrow",
    )


def _drawable(row: CaseRow) -> bool:
    values = (row.gflops, row.baseline_gflops, row.intensity)
    return all(math.isfinite(value) and value > 0 for value in values)


def _frame(view: View, rows: Sequence[CaseRow], ticks: int) -> Frame:
    intensities = [row.intensity for row in rows]
    rates = [rate for row in rows for rate in (row.gflops, row.baseline_gflops)]
    for row in rows:
        peak = view.peak(row.case.dtype)
        if peak:
            rates.append(peak[1])
    return Frame(
        (min(intensities) / 1.5, max(intensities) * 1.5), (min(rates) / 1.4, max(rates) * 1.3), ticks
    )


def draw_grid(axes: Axes, frame: Frame, height: float) -> None:
    """Lines at round numbers of both axes, with their names."""
    for tick in marks.ratio_ticks(*frame.intensity, frame.ticks):
        marks.rule(axes, (tick, tick), frame.rate, Role.RULE, 0.8, zorder=0)
        marks.write(axes, tick, -14 / height, f"{tick:,.5g}", align="center", place="column")
    for tick in marks.ratio_ticks(*frame.rate, 8):
        marks.rule(axes, frame.intensity, (tick, tick), Role.RULE, 0.8, zorder=0)
        axes.annotate(
            _rate_label(tick),
            (frame.intensity[0], tick),
            (-7, 0),
            textcoords="offset points",
            color=Role.MUTED.placeholder,
            fontsize=11,
            ha="right",
            va="center_baseline",
            annotation_clip=False,
        )
    marks.write(axes, 0.5, -34 / height, "FLOP per byte", align="center", place="axes")
    axes.annotate(
        "GFLOP/s",
        (0, 1 + 14 / height),
        (-7, 0),
        xycoords="axes fraction",
        textcoords="offset points",
        color=Role.MUTED.placeholder,
        fontsize=11,
        ha="right",
        va="center_baseline",
        annotation_clip=False,
    )


def _rate_label(rate: float) -> str:
    """A round number of GFLOP/s; in thousands where it would not fit the margin."""
    return f"{rate:,.5g}" if rate < _THOUSANDS_FROM else f"{rate / 1e3:,.5g}k"


def draw_ceilings(axes: Axes, frame: Frame, peak: tuple[str, float] | None, bandwidth: float) -> None:
    """The compute roof, and the memory slope up to where they meet."""
    (left, right), (low, high) = frame.intensity, frame.rate
    if peak is not None:
        name, rate = peak
        knee = min(max(left, rate / bandwidth), right) if bandwidth > 0 else left
        marks.rule(axes, (knee, right), (rate, rate), Role.INK, 1.4, zorder=2)
        _roof_label(axes, right, rate, f"{text.clean(name)} peak {text.figures(rate)}", "right")
        high = rate
    if bandwidth > 0:
        start, end = max(left, low / bandwidth), min(right, high / bandwidth)
        if end > start:
            marks.rule(axes, (start, end), (start * bandwidth, end * bandwidth), Role.INK, 1.4, zorder=2)
            _roof_label(axes, start, start * bandwidth, f"copy {text.figures(bandwidth)} GB/s", "left")


def _roof_label(axes: Axes, x: float, y: float, words: str, align: str) -> None:
    axes.annotate(
        words,
        (x, y),
        (0, 9) if align == "right" else (8, -6),
        textcoords="offset points",
        color=Role.INK.placeholder,
        fontsize=11,
        ha=align,
        va="center_baseline",
        annotation_clip=False,
    )


def _case(axes: Axes, view: View, row: CaseRow, tips: dict[int, str]) -> None:
    xs = (row.intensity, row.intensity)
    marks.rule(axes, xs, (row.baseline_gflops, row.gflops), Role.CONTROL, 1.2, alpha=0.6, zorder=2)
    for name, rate, role, face in (
        (view.baseline, row.baseline_gflops, Role.BASELINE, Role.PAGE),
        (view.candidate, row.gflops, Role.CANDIDATE, Role.CANDIDATE),
    ):
        number = len(tips)
        tips[number] = f"{row.name} {row.case.dtype}, {name}: {text.figures(rate)} GFLOP/s"
        marks.mark(axes, row.intensity, rate, "o", 7, role, face=face, gid=svg.tip(number))
