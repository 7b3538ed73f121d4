"""The raw samples of one case: a lane per implementation, a dot per timed call, time running downwards."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from cudadent42.records import Sample
from cudadent42.report import svg, text
from cudadent42.report.figures import marks
from cudadent42.report.svg import Role
from cudadent42.report.view import CaseRow, View

_WIDTH = 320.0
_LANE = 20.0
_FOOT = 18.0
_VALUES = 56.0
_MOST_DOTS = 6000
"""Over all panels; beyond it every n-th block is drawn, so that the page stays small."""


@dataclass(frozen=True)
class Strips:
    """The samples of all cases, on one scale: latency over the median of the case's baseline."""

    lanes: tuple[tuple[str, Role], ...]
    """Implementations from top to bottom."""
    limits: tuple[float, float]
    stride: int
    """Every ``stride``-th block is drawn."""
    series: Mapping[tuple[str, str], Sequence[Sample]]
    """Samples by case id and implementation, in block order."""
    medians: Mapping[tuple[str, str], float]

    def panel(self, row: CaseRow, number: int, sheet: svg.Sheet) -> str:
        """The picture of one case; empty where it has no samples."""
        if not any((row.case.id, name) in self.series for name, _ in self.lanes):
            return ""
        return _panel(self, row, number, sheet)


def strips(view: View) -> Strips:
    """Sort the run's samples into series and choose the common scale."""
    series: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in view.run.samples:
        if math.isfinite(sample.latency_ms) and sample.latency_ms > 0:
            series[sample.case, sample.implementation].append(sample)
    for samples in series.values():
        samples.sort(key=lambda sample: sample.block)
    medians = {key: statistics.median(s.latency_ms for s in samples) for key, samples in series.items()}
    return Strips(
        lanes=_lanes(view, {implementation for _, implementation in series}),
        limits=_limits(view, series, medians),
        stride=max(1, math.ceil(sum(map(len, series.values())) / _MOST_DOTS)),
        series=series,
        medians=medians,
    )


def _lanes(view: View, present: set[str]) -> tuple[tuple[str, Role], ...]:
    """Baseline, candidate, others, and last whatever else was timed: the control."""
    plan = view.run.plan
    candidate = view.candidate_name
    named = [
        plan.baseline,
        candidate,
        *(n for n in plan.implementations if n not in (plan.baseline, candidate)),
    ]
    rest = sorted(present - set(named))
    lanes = []
    spare = iter(marks.OTHER_ROLES)
    for name in (name for name in [*named, *rest] if name in present):
        if name == plan.baseline:
            role = Role.BASELINE
        elif name == view.run.plan.baseline + "_control":
            role = Role.CONTROL
        elif name == candidate:
            role = Role.CANDIDATE
        else:
            role = next(spare, Role.MUTED)
        lanes.append((name, role))
    return tuple(lanes)


def _limits(
    view: View, series: Mapping[tuple[str, str], Sequence[Sample]], medians: Mapping[tuple[str, str], float]
) -> tuple[float, float]:
    """Wide enough for the middle 90 % of every series; what lies beyond is marked at the edge."""
    ends = []
    for (case, _), samples in series.items():
        unit = medians.get((case, view.run.plan.baseline))
        if unit:
            latencies = sorted(sample.latency_ms / unit for sample in samples)
            ends += [
                latencies[int(0.05 * (len(latencies) - 1))],
                latencies[math.ceil(0.95 * (len(latencies) - 1))],
            ]
    if not ends:
        return (0.5, 2.0)
    return (min(*ends, 0.97) / 1.06, max(*ends, 1.03) * 1.06)


def _panel(strips: Strips, row: CaseRow, number: int, sheet: svg.Sheet) -> str:
    lanes = strips.lanes
    height = _LANE * len(lanes)
    baseline = lanes[0][0]
    unit = strips.medians.get((row.case.id, baseline)) or next(
        median for (case, _), median in strips.medians.items() if case == row.case.id
    )
    fig = svg.figure(_WIDTH, height + _FOOT)
    axes = svg.panel(fig, 0, 0, _WIDTH - _VALUES, height)
    axes.set_xscale("log")
    axes.set_xlim(*strips.limits)
    axes.set_ylim(len(lanes), 0)
    axes.set_axis_off()
    for tick in marks.ratio_ticks(*strips.limits, 6):
        one = abs(tick - 1) < 1e-9
        marks.rule(axes, (tick, tick), (0, len(lanes)), Role.MUTED if one else Role.RULE, 0.8, zorder=0)
        marks.write(axes, tick, len(lanes) + 10 / _LANE, f"{tick:.4g}", align="center", size=10)
    told = []
    for lane, (name, role) in enumerate(lanes):
        samples = strips.series.get((row.case.id, name))
        if samples:
            median = strips.medians[row.case.id, name]
            _lane(axes, strips, samples, unit, median, lane, role)
            axes.text(
                1 + _VALUES / (_WIDTH - _VALUES),
                lane + 0.5,
                text.latency(median),
                transform=axes.get_yaxis_transform(),
                color=(role if role is not Role.CONTROL else Role.MUTED).placeholder,
                fontsize=11,
                ha="right",
                va="center_baseline",
            )
            told.append(
                f"{text.clean(name)}: median {text.latency(median)} of {text.plural(len(samples), 'sample')}"
            )
    return svg.render(
        fig,
        prefix=f"s{number}",
        title=f"Samples of {row.name} {row.case.dtype}",
        description="; ".join(told),
        sheet=sheet,
    )


def _lane(
    axes: Axes, strips: Strips, samples: Sequence[Sample], unit: float, median: float, lane: int, role: Role
) -> None:
    low, high = strips.limits
    last = max(samples[-1].block, 1)
    inside: list[tuple[float, float]] = []
    for sample in samples:
        if sample.block % strips.stride:
            continue
        x, y = sample.latency_ms / unit, lane + 0.16 + 0.68 * sample.block / last
        if low <= x <= high:
            inside.append((x, y))
        else:
            axes.plot(
                [high if x > high else low],
                [y],
                marker=">" if x > high else "<",
                markersize=3.5,
                color=role.placeholder,
                linestyle="none",
                clip_on=False,
            )
    if inside:
        vertices = [corner for dot in inside for corner in (dot, dot)]
        codes = [Path.MOVETO, Path.LINETO] * len(inside)
        axes.add_patch(
            PathPatch(
                Path(vertices, codes),
                facecolor="none",
                edgecolor=role.placeholder,
                linewidth=2.6,
                capstyle="round",
                alpha=0.65,
                clip_on=False,
            )
        )
    if low <= median / unit <= high:
        marks.rule(axes, (median / unit,) * 2, (lane + 0.06, lane + 0.94), role, 1.6)
