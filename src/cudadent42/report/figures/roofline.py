"""Roofline: rate against intensity under measured peaks (Williams, Waterman, Patterson, CACM 52(4), 2009)."""

from __future__ import annotations

import math

from matplotlib.axes import Axes

from cudadent42.report import svg, text
from cudadent42.report.figures import marks
from cudadent42.report.svg import Role
from cudadent42.report.view import CaseRow, View

_MARKERS = ("o", "s", "D", "^")
_TOP = 14.0
_LEFT = 58.0
_FOOT = 44.0


def roofline(view: View, sheet: svg.Sheet, *, wide: bool) -> str:
    """Every timed case, baseline and candidate joined; empty where nothing was timed."""
    rows = [row for row in view.timed if _drawable(row)]
    if not rows:
        return ""
    width, height = (1040.0, 430.0) if wide else (360.0, 340.0)
    peaks = view.run.results.peaks if view.run.results else {}
    compute = {name: peak for name, peak in peaks.items() if name.endswith("_gflops") and peak > 0}
    memory = peaks.get("copy_gbps", math.nan)
    rates = [rate for row in rows for rate in (row.gflops, row.baseline_gflops)] + list(compute.values())
    intensities = [row.intensity for row in rows]
    fig = svg.figure(width, height)
    right = 150.0 if wide else 14.0
    axes = svg.panel(fig, _LEFT, _TOP, width - _LEFT - right, height - _TOP - _FOOT)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_axis_off()
    axes.set_xlim(min(intensities) / 1.5, max(intensities) * 1.5)
    axes.set_ylim(min(rates) / 1.5, max(rates) * 1.35)
    _grid(axes, wide)
    _ceilings(axes, compute, memory, wide)
    tips: dict[int, str] = {}
    for row in rows:
        _case(axes, view, row, tips)
    return svg.render(
        fig,
        prefix=f"roofline-{'wide' if wide else 'narrow'}",
        title="Roofline: achieved GFLOP/s against floating-point operations per byte",
        description=_description(rows, compute),
        sheet=sheet,
        tips=tips if wide else None,
        css_class="wide" if wide else "narrow",
    )


def markers(view: View) -> dict[str, str]:
    """The matplotlib marker of each dtype."""
    return {dtype: _MARKERS[index % len(_MARKERS)] for index, dtype in enumerate(view.dtypes)}


def _drawable(row: CaseRow) -> bool:
    values = (row.gflops, row.baseline_gflops, row.intensity)
    return all(math.isfinite(value) and value > 0 for value in values)


def _grid(axes: Axes, wide: bool) -> None:
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    for tick in marks.ratio_ticks(left, right, 8 if wide else 5):
        marks.rule(axes, (tick, tick), (low, high), Role.RULE, 0.8, zorder=0)
        axes.text(
            tick,
            -0.045,
            f"{tick:,.5g}",
            transform=axes.get_xaxis_transform(),
            color=Role.MUTED.placeholder,
            fontsize=11,
            ha="center",
            va="center",
        )
    for tick in marks.ratio_ticks(low, high, 8):
        marks.rule(axes, (left, right), (tick, tick), Role.RULE, 0.8, zorder=0)
        axes.text(
            -0.012,
            tick,
            f"{tick:,.5g}",
            transform=axes.get_yaxis_transform(),
            color=Role.MUTED.placeholder,
            fontsize=11,
            ha="right",
            va="center_baseline",
        )
    marks.write(axes, 0.5, -0.1, "FLOP per byte of compulsory traffic", align="center", place="axes")
    marks.write(axes, 0.008, 0.985, "GFLOP/s", place="axes")


def _ceilings(axes: Axes, compute: dict[str, float], memory: float, wide: bool) -> None:
    left, right = axes.get_xlim()
    low = axes.get_ylim()[0]
    bandwidth = math.isfinite(memory) and memory > 0
    for name, peak in compute.items():
        knee = peak / memory if bandwidth else left
        marks.rule(axes, (max(left, min(knee, right)), right), (peak, peak), Role.INK, 1.4, zorder=2)
        label = f"{text.clean(name.removesuffix('_gflops'))} peak {text.figures(peak)}"
        if wide:
            axes.annotate(
                label,
                (right, peak),
                (8, 0),
                textcoords="offset points",
                color=Role.INK.placeholder,
                fontsize=11,
                va="center",
                annotation_clip=False,
            )
        else:
            axes.annotate(
                label,
                (right, peak),
                (0, 8),
                textcoords="offset points",
                color=Role.INK.placeholder,
                fontsize=10.5,
                ha="right",
                va="center",
                annotation_clip=False,
            )
    if bandwidth and compute:
        end = min(right, max(compute.values()) / memory)
        start = max(left, low / memory)
        if end > start:
            marks.rule(axes, (start, end), (start * memory, end * memory), Role.INK, 1.4, zorder=2)
            marks.write(
                axes, end, end * memory * 1.12, f"copy {text.figures(memory)} GB/s ", size=10.5, align="right"
            )


def _case(axes: Axes, view: View, row: CaseRow, tips: dict[int, str]) -> None:
    shape = markers(view)[row.case.dtype]
    xs = (row.intensity, row.intensity)
    marks.rule(axes, xs, (row.baseline_gflops, row.gflops), Role.RULE, 1.4, zorder=2)
    for name, rate, role, face in (
        (view.baseline, row.baseline_gflops, Role.BASELINE, Role.PAGE),
        (view.candidate, row.gflops, Role.CANDIDATE, Role.CANDIDATE),
    ):
        number = len(tips)
        tips[number] = f"{row.name} {row.case.dtype}, {name}: {text.figures(rate)} GFLOP/s"
        axes.plot(
            [row.intensity],
            [rate],
            marker=shape,
            markersize=6.5,
            markerfacecolor=face.placeholder,
            markeredgecolor=role.placeholder,
            markeredgewidth=1.4,
            linestyle="none",
            clip_on=False,
            gid=svg.tip(number),
            zorder=3,
        )


def _description(rows: list[CaseRow], compute: dict[str, float]) -> str:
    best = max(rows, key=lambda row: row.gflops)
    line = f"Highest rate: {text.figures(best.gflops)} GFLOP/s on {best.name} {best.case.dtype}."
    if not compute:
        return line + " No ceiling was measured."
    ceilings = ", ".join(
        f"{name.removesuffix('_gflops')} {text.figures(peak)}" for name, peak in compute.items()
    )
    return f"{line} Measured ceilings in GFLOP/s: {ceilings}."
