"""Speed-up of every case with its interval: a panel per dtype, a line per case, 1 always in sight."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass

from matplotlib.axes import Axes

from cudadent42.model import text
from cudadent42.model.records import Comparison
from cudadent42.stages.report import svg
from cudadent42.stages.report.cases import CaseRow
from cudadent42.stages.report.figures import marks
from cudadent42.stages.report.svg import Role
from cudadent42.stages.report.view import View

_LANE = 9.0
_GAP = 15.0
_HEAD = 30.0
_FOOT = 38.0
_CHARACTER = 6.4
_HEADLINE_LETTERS = 80
"""In a line of the headline; more would leave the picture."""
_HEADLINE_PITCH = 25.0
_SUBLINE_LETTERS = 150
_SUBLINE_PITCH = 17.0
_LEGEND_PITCH = 20.0


@dataclass(frozen=True)
class _Layout:
    """Measures in pixels."""

    width: float
    label: float
    """Column of case names."""
    value: float
    """Column of figures beside each panel."""
    side_by_side: bool
    name_length: int
    with_interval: bool
    ticks: int


def speedup(view: View, sheet: svg.Sheet | None, *, wide: bool) -> str:
    """The picture, 1040 or 360 pixels wide. Without a sheet it gets a heading, for use outside the page."""
    standalone = sheet is None
    names = list(dict.fromkeys(row.name for row in view.rows))
    dtypes = view.dtypes
    layout = _layout(names, len(dtypes), wide)
    lanes = min(1 + len(view.other_names), marks.LANES)
    row_height = _GAP + _LANE * lanes
    titles = _titles(view) if standalone else _Titles((), ())
    heading = titles.height if standalone else 0.0
    rows_of = {dtype: [row for row in view.rows if row.case.dtype == dtype] for dtype in dtypes}
    columns = len(dtypes) if layout.side_by_side else 1
    height_of = {
        dtype: row_height * (len(names) if layout.side_by_side else len(rows_of[dtype])) for dtype in dtypes
    }
    block = _HEAD + _FOOT
    total = heading + (
        block + max(height_of.values())
        if layout.side_by_side
        else sum(block + height for height in height_of.values())
    )
    pad = 20.0 if standalone else 0.0
    legend = 2 * _LEGEND_PITCH if standalone else 0.0
    fig = svg.figure(layout.width + 2 * pad, total + 0.5 * pad + legend)
    panel_width = (layout.width - layout.label - columns * layout.value) / columns
    limits = _limits(view)
    tips: dict[int, str] = {}
    if standalone:
        _heading(svg.panel(fig, pad, pad / 2, layout.width, heading), titles)
        _legend(svg.panel(fig, pad, total, layout.width, legend), view, layout.width)
    top = heading
    for number, dtype in enumerate(dtypes):
        column = number if layout.side_by_side else 0
        left = pad + layout.label + column * (panel_width + layout.value)
        axes = svg.panel(fig, left, top + _HEAD, panel_width, height_of[dtype])
        axes.set_xscale("log")
        axes.set_xlim(*limits)
        order = names if layout.side_by_side else [row.name for row in rows_of[dtype]]
        axes.set_ylim(len(order) - 0.5, -0.5)
        axes.set_axis_off()
        _background(axes, view, limits, len(order), layout.ticks, height_of[dtype])
        if lanes > 1:
            for y in range(1, len(order), 2):
                axes.axhspan(y - 0.5, y + 0.5, color=Role.BAND.placeholder, alpha=0.7, linewidth=0, zorder=0)
        _panel_title(axes, view, dtype, height_of[dtype])
        if column == 0:
            for y, name in enumerate(order):
                x = -(layout.label - 2) / panel_width
                axes.text(
                    x,
                    y,
                    text.shorten(name, layout.name_length),
                    transform=axes.get_yaxis_transform(),
                    color=Role.INK.placeholder,
                    fontsize=12,
                    va="center_baseline",
                    parse_math=False,
                )
        for row in rows_of[dtype]:
            _row(axes, view, row, order.index(row.name), lanes, layout, tips, panel_width)
        if not layout.side_by_side:
            top += block + height_of[dtype]
    return svg.render(
        fig,
        prefix=f"speedup-{'solo' if standalone else 'wide' if wide else 'narrow'}",
        title=f"Speed-up of {view.candidate} over {view.baseline}, every case",
        description=f"{view.headline}. {view.subline}. The table of cases holds the same numbers.",
        sheet=sheet,
        tips=tips if wide else None,
        css_class="wide" if wide else "narrow",
    )


def _layout(names: list[str], dtypes: int, wide: bool) -> _Layout:
    longest = max((len(name) for name in names), default=0)
    if wide:
        length = min(longest, 28)
        return _Layout(
            width=1040,
            label=max(64, length * _CHARACTER + 18),
            value=158 if dtypes < 3 else 58,
            side_by_side=dtypes <= 3,
            name_length=28,
            with_interval=dtypes < 3,
            ticks=max(4, 12 // max(dtypes, 1)),
        )
    length = min(longest, 16)
    return _Layout(360, max(50, length * _CHARACTER + 14), 52, False, 16, False, 5)


def _limits(view: View) -> tuple[float, float]:
    values = [
        end
        for row in view.measured
        for comparison in _shown(view, row)
        for end in (comparison.ci_low, comparison.ci_high, comparison.speedup)
    ]
    return marks.ratio_limits(values, view.run.plan.margin)


def control_shown(view: View) -> bool:
    """Whether the A/A control is drawn too: only on a scale where it can be told from 1."""
    low, high = _limits(view)
    return high / low < 1.6 and any(row.control for row in view.rows)


def _shown(view: View, row: CaseRow) -> list[Comparison]:
    shown = [row.comparison] if row.comparison else []
    return shown + [row.others[name] for name in view.other_names[: marks.LANES - 1] if name in row.others]


@dataclass(frozen=True)
class _Titles:
    """The lines above a picture that stands alone."""

    headline: tuple[str, ...]
    subline: tuple[str, ...]

    @property
    def height(self) -> float:
        """In pixels."""
        return 20 + _HEADLINE_PITCH * len(self.headline) + _SUBLINE_PITCH * len(self.subline)


def _titles(view: View) -> _Titles:
    subline = f"{view.subline}. {view.date[:10]}."
    return _Titles(
        tuple(textwrap.wrap(view.headline, _HEADLINE_LETTERS, break_on_hyphens=False)),
        tuple(textwrap.wrap(subline, _SUBLINE_LETTERS)),
    )


def _heading(axes: Axes, titles: _Titles) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(titles.height, 0)
    y = _HEADLINE_PITCH / 2 + 2
    for line in titles.headline:
        marks.write(axes, 0, y, line, role=Role.INK, size=19, bold=True)
        y += _HEADLINE_PITCH
    for line in titles.subline:
        marks.write(axes, 0, y, line, size=12)
        y += _SUBLINE_PITCH


def _legend(axes: Axes, view: View, width: float) -> None:
    """What the marks mean, on two lines under the panels: the scale, then the marks."""
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(2, 0)
    ends = "Bars are 95 % intervals, on a log scale."
    both = f"Median latency of {view.baseline} over that of {view.candidate}. {ends}"
    marks.write(axes, 2, 0.5, both if len(both) <= _SUBLINE_LETTERS else ends, size=11.5)
    x = 8.0
    for verdict in view.verdicts:
        marks.point(axes, x, 1.5, verdict)
        marks.write(axes, x + 10, 1.5, verdict.value, size=11.5)
        x += 10 + len(verdict.value) * _CHARACTER + 22
    for name, shape, role in zip(view.other_names, marks.OTHER_MARKERS, marks.OTHER_ROLES, strict=False):
        label = text.shorten(text.implementation(name), 40)
        marks.mark(axes, x, 1.5, shape, 4.6, role)
        marks.write(axes, x + 10, 1.5, label, size=11.5)
        x += 10 + len(label) * _CHARACTER + 22


def _background(
    axes: Axes, view: View, limits: tuple[float, float], rows: int, most_ticks: int, height: float
) -> None:
    margin = view.run.plan.margin
    axes.axvspan(1 - margin, 1 + margin, color=Role.RULE.placeholder, alpha=0.7, linewidth=2, zorder=0.2)
    for y in range(rows):
        marks.rule(axes, limits, (y, y), Role.RULE, 0.6, zorder=0.5)
    for tick in marks.ratio_ticks(*limits, most_ticks):
        one = abs(tick - 1) < 1e-9
        marks.rule(
            axes,
            (tick, tick),
            (-0.5, rows - 0.5),
            Role.INK if one else Role.RULE,
            1.2 if one else 0.8,
            zorder=1,
        )
        marks.write(axes, tick, -14 / height, marks.tick_label(tick), align="center", coordinates="column")


def _panel_title(axes: Axes, view: View, dtype: str, height: float) -> None:
    y = 1 + 14 / height
    mean = view.dtype_geomean(dtype)
    marks.write(axes, 0, y, text.clean(dtype), role=Role.INK, size=13, bold=True, coordinates="axes")
    if math.isfinite(mean):
        marks.write(axes, 1, y, f"geometric mean {text.ratio(mean)}", align="right", coordinates="axes")


def _row(
    axes: Axes,
    view: View,
    row: CaseRow,
    y: int,
    lanes: int,
    layout: _Layout,
    tips: dict[int, str],
    panel_width: float,
) -> None:
    comparison = row.comparison
    beside = 1 + 10 / panel_width
    if comparison is None:
        if row.verified and not row.verified.passed:
            _value(axes, beside, y, "failed", Role.SLOWER, bold=True)
        else:
            _value(axes, beside, y, "not timed", Role.MUTED)
        return
    if not row.measured:
        _value(axes, beside, y, "no ratio", Role.MUTED)
        return
    pitch = _LANE / (_GAP + _LANE * lanes)
    first = y - pitch * (lanes - 1) / 2
    if row.control and control_shown(view):
        marks.mark(axes, row.control.speedup, first, "o", 2.4, Role.CONTROL)
    role = marks.ROLE_OF[comparison.verdict]
    if math.isfinite(comparison.speedup):
        marks.rule(
            axes,
            (1, comparison.speedup),
            (first, first),
            role,
            4,
            alpha=0.22,
            zorder=2,
            solid_capstyle="butt",
        )
    marks.rule(axes, (comparison.ci_low, comparison.ci_high), (first, first), role, 2.2, zorder=3)
    number = len(tips)
    tips[number] = _tip(row, comparison)
    marks.point(axes, comparison.speedup, first, comparison.verdict, gid=svg.tip(number))
    for lane, name in enumerate(view.other_names[: lanes - 1]):
        if name in row.others:
            _other(axes, row, row.others[name], first + pitch * (lane + 1), lane, tips)
    _value(axes, beside, y, text.ratio(comparison.speedup), Role.INK, bold=True)
    if layout.with_interval and math.isfinite(comparison.speedup):
        ends = text.interval(comparison.ci_low, comparison.ci_high)
        _value(axes, beside + 54 / panel_width, y, ends, Role.MUTED)


def _value(axes: Axes, x: float, y: float, words: str, role: Role, bold: bool = False) -> None:
    axes.text(
        x,
        y,
        words,
        transform=axes.get_yaxis_transform(),
        color=role.placeholder,
        fontsize=11.5,
        va="center_baseline",
        fontweight="bold" if bold else "normal",
    )


def _other(
    axes: Axes, row: CaseRow, comparison: Comparison, y: float, lane: int, tips: dict[int, str]
) -> None:
    role = marks.OTHER_ROLES[lane]
    marks.rule(axes, (comparison.ci_low, comparison.ci_high), (y, y), role, 1.6, zorder=3)
    number = len(tips)
    tips[number] = _tip(row, comparison)
    marks.mark(axes, comparison.speedup, y, marks.OTHER_MARKERS[lane], 4.6, role, gid=svg.tip(number))


def _tip(row: CaseRow, comparison: Comparison) -> str:
    return text.clean(
        f"{row.name} {row.case.dtype}, {row.shape}: {text.implementation(comparison.implementation)} "
        f"{text.ratio(comparison.speedup)} ({text.interval(comparison.ci_low, comparison.ci_high)}), "
        f"{comparison.verdict.value}; {text.latency(comparison.latency_ms)} against "
        f"{text.latency(comparison.baseline_latency_ms)}"
    )
