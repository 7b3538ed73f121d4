"""Roofline: rate against intensity under measured peaks (Williams, Waterman, Patterson, CACM 52(4), 2009)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from cudadent42.model import text
from cudadent42.stages.report import svg
from cudadent42.stages.report.cases import CaseRow
from cudadent42.stages.report.figures import labels, marks
from cudadent42.stages.report.svg import Role
from cudadent42.stages.report.view import View

_HEAD = 26.0
_LEFT = 50.0
_GAP = 28.0
_FOOT = 46.0
_THOUSANDS_FROM = 1e5
_MARK = 7.0
_NAME_LETTERS = 20


@dataclass(frozen=True)
class Frame:
    """Limits that all panels share, and how many ticks fit."""

    intensity: tuple[float, float]
    rate: tuple[float, float]
    ticks: int


@dataclass(frozen=True)
class Beside:
    """Words at an offset in pixels from a place in data coordinates."""

    x: float
    y: float
    words: str
    align: str
    dx: float
    dy: float


def roofline(view: View, sheet: svg.Sheet, *, wide: bool) -> str:
    """A panel per dtype with its cases, baseline and candidate joined; empty where nothing was timed.

    Names stand beside the candidate's marks where they overlap nothing.
    """
    rows = [row for row in view.measured if _drawable(row)]
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
            axes, 0, 1 + 14 / height, text.clean(dtype), role=Role.INK, size=13, bold=True, coordinates="axes"
        )
        draw_grid(axes, frame, height)
        roofs = draw_ceilings(axes, frame, view.peak(dtype), view.bandwidth)
        here = [row for row in rows if row.case.dtype == dtype]
        for row in here:
            _case(axes, view, row, tips)
        _names(axes, here, roofs, view.peak(dtype))
    return svg.render(
        fig,
        prefix=f"roofline-{'wide' if wide else 'narrow'}",
        title="Roofline: achieved GFLOP/s against floating-point operations per byte",
        description="; ".join(
            f"{row.name} {row.case.dtype}: {text.figures(row.baseline_gflops)} to {text.figures(row.gflops)}"
            for row in rows
        ),
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
        marks.write(axes, tick, -14 / height, f"{tick:,.5g}", align="center", coordinates="column")
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
    marks.write(axes, 0.5, -34 / height, "FLOP per byte", align="center", coordinates="axes")
    axes.annotate(
        "GFLOP/s",
        (0, 1 + 14 / height),
        (-4, 0),
        xycoords="axes fraction",
        textcoords="offset points",
        color=Role.MUTED.placeholder,
        fontsize=10,
        ha="right",
        va="center_baseline",
        annotation_clip=False,
    )


def _rate_label(rate: float) -> str:
    """A round number of GFLOP/s; in thousands where it would not fit the margin."""
    return f"{rate:,.5g}" if rate < _THOUSANDS_FROM else f"{rate / 1e3:,.5g}k"


def draw_ceilings(axes: Axes, frame: Frame, peak: tuple[str, float] | None, bandwidth: float) -> list[Beside]:
    """The compute roof, and the memory slope up to where they meet; what is written at them."""
    (left, right), (low, high) = frame.intensity, frame.rate
    written = []
    if peak is not None:
        name, rate = peak
        knee = min(max(left, rate / bandwidth), right) if bandwidth > 0 else left
        marks.rule(axes, (knee, right), (rate, rate), Role.INK, 1.4, zorder=2)
        written.append(
            Beside(right, rate, f"{text.clean(name)} peak {text.figures(rate)}", "right", 0.0, 9.0)
        )
        high = rate
    if bandwidth > 0:
        start, end = max(left, low / bandwidth), min(right, high / bandwidth)
        if end > start:
            marks.rule(axes, (start, end), (start * bandwidth, end * bandwidth), Role.INK, 1.4, zorder=2)
            words = f"copy {text.figures(bandwidth)} GB/s"
            written.append(Beside(start, start * bandwidth, words, "left", 8.0, -6.0))
    for label in written:
        _write_beside(axes, label, Role.INK, 11)
    return written


def _write_beside(axes: Axes, label: Beside, role: Role, size: float) -> None:
    axes.annotate(
        label.words,
        (label.x, label.y),
        (label.dx, label.dy),
        textcoords="offset points",
        color=role.placeholder,
        fontsize=size,
        ha=label.align,
        va="center_baseline",
        annotation_clip=False,
        parse_math=False,
    )


def _names(
    axes: Axes, rows: Sequence[CaseRow], roofs: Sequence[Beside], peak: tuple[str, float] | None
) -> None:
    """The cases' names, those at the highest rates first; one that would overlap something is left out."""

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = axes.transData.transform((x, y))
        return float(across), float(up)

    ordered = sorted(rows, key=lambda row: -row.gflops)
    points = [(*at(row.intensity, row.gflops), text.shorten(row.name, _NAME_LETTERS)) for row in ordered]
    taken = [labels.around(x, y, _MARK / 2) for x, y, _ in points]
    taken += [labels.around(*at(row.intensity, row.baseline_gflops), _MARK / 2) for row in rows]
    for roof in roofs:
        x, y = at(roof.x, roof.y)
        taken.append(labels.text_box(x + roof.dx, y + roof.dy, roof.words + "  ", roof.align))
    area = axes.get_window_extent()
    if peak is not None:
        _, y = at(rows[0].intensity, peak[1])
        taken.append(labels.Box(area.x0, y - 1, area.x1, y + 1))
    bounds = labels.Box(area.x0, area.y0, area.x1, area.y1)
    for row, (_, _, name), label in zip(ordered, points, labels.place(points, taken, bounds), strict=True):
        if label is not None:
            there = Beside(row.intensity, row.gflops, name, label.align, label.dx, label.dy)
            _write_beside(axes, there, Role.MUTED, 10)


def _case(axes: Axes, view: View, row: CaseRow, tips: dict[int, str]) -> None:
    xs = (row.intensity, row.intensity)
    marks.rule(axes, xs, (row.baseline_gflops, row.gflops), Role.CONTROL, 1.2, alpha=0.6, zorder=2)
    for name, rate, role, face in (
        (view.baseline, row.baseline_gflops, Role.BASELINE, Role.PAGE),
        (view.candidate, row.gflops, Role.CANDIDATE, Role.CANDIDATE),
    ):
        number = len(tips)
        tips[number] = f"{row.name} {row.case.dtype}, {name}: {text.figures(rate)} GFLOP/s"
        marks.mark(axes, row.intensity, rate, "o", _MARK, role, face=face, gid=svg.tip(number))
