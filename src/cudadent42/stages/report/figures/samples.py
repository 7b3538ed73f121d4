"""The raw samples of one case: a lane per implementation, a dot per timed call, time running downwards.

Each lane is centred on its own median: how far apart the medians are is another picture's subject, and on a
scale that holds both, the noise that the interval rests on would be a hair's breadth.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from cudadent42.model import text
from cudadent42.model.records import Sample
from cudadent42.stages.report import svg
from cudadent42.stages.report.cases import CaseRow
from cudadent42.stages.report.figures import marks
from cudadent42.stages.report.svg import Role
from cudadent42.stages.report.view import View

_WIDTH = 320.0
_LANE = 24.0
_FOOT = 18.0
_VALUES = 60.0
_SIDE = 6.0
_LABEL = 32.0
_LINEAR = 0.01
"""Deviation up to which the scale is about linear; logarithmic beyond, so that outliers stay on it."""
_MOST_DOTS = 6000
"""Over all panels; beyond it every n-th block is drawn, so that the page stays small."""


@dataclass(frozen=True)
class Strips:
    """The samples of all cases, on one scale of deviations from the median."""

    lanes: tuple[tuple[str, Role], ...]
    """Implementations from top to bottom."""
    limits: tuple[float, float]
    """Smallest and largest deviation of the scale, as fractions."""
    stride: int
    """Every ``stride``-th block is drawn."""
    series: Mapping[tuple[str, str], Sequence[Sample]]
    """Samples by case id and implementation, in block order."""

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
    deviations = [each for samples in series.values() for each in _deviations(samples)]
    return Strips(
        lanes=_lanes(view, {implementation for _, implementation in series}),
        limits=(min([*deviations, -_LINEAR]), max([*deviations, _LINEAR])),
        stride=max(1, math.ceil(sum(map(len, series.values())) / _MOST_DOTS)),
        series=series,
    )


def _lanes(view: View, present: set[str]) -> tuple[tuple[str, Role], ...]:
    """Baseline, candidate, others, and last whatever else was timed: the control."""
    plan = view.run.plan
    first = (plan.baseline, view.candidate_name)
    named = [*first, *(name for name in plan.implementations if name not in first)]
    roles = {
        plan.baseline: Role.BASELINE,
        view.candidate_name: Role.CANDIDATE,
        view.control_name: Role.CONTROL,
    }
    spare = iter(marks.OTHER_ROLES)
    order = [name for name in [*named, *sorted(present - set(named))] if name in present]
    return tuple((name, roles.get(name) or next(spare, Role.MUTED)) for name in order)


def _deviations(samples: Sequence[Sample]) -> list[float]:
    """Each latency over the series' median, less 1."""
    median = statistics.median(sample.latency_ms for sample in samples)
    return [sample.latency_ms / median - 1 for sample in samples]


def _place(deviation: float) -> float:
    return math.asinh(deviation / _LINEAR)


def _ticks(limits: tuple[float, float], width: float) -> list[float]:
    """0 and outwards from it, as many as find room for their labels on ``width`` pixels and in the left margin."""
    low, high = map(_place, limits)
    least = _LABEL * (high - low) / width
    first = low + (_LABEL / 2 - _SIDE) * (high - low) / width
    ticks = [0.0]
    for tick in (0.01, -0.01, 0.03, -0.03, 0.1, -0.1, 1.0, -0.5, 9.0, 99.0, 999.0):
        at = _place(tick)
        if first <= at <= high and all(abs(at - _place(other)) >= least for other in ticks):
            ticks.append(tick)
    return ticks


def _panel(strips: Strips, row: CaseRow, number: int, sheet: svg.Sheet) -> str:
    lanes = [lane for lane in strips.lanes if (row.case.id, lane[0]) in strips.series]
    height = _LANE * len(lanes)
    width = _WIDTH - _VALUES - _SIDE
    fig = svg.figure(_WIDTH, height + _FOOT)
    axes = svg.panel(fig, _SIDE, 0, width, height)
    axes.set_xlim(*map(_place, strips.limits))
    axes.set_ylim(len(lanes), 0)
    axes.set_axis_off()
    ticks = _ticks(strips.limits, width)
    grid = [(_place(tick), end) for tick in ticks for end in (0, len(lanes))]
    _stroke(axes, grid, Role.RULE, linewidth=0.8, zorder=0)
    for tick in ticks:
        marks.write(axes, _place(tick), len(lanes) + 10 / _LANE, _label(tick), align="center", size=10)
    told = []
    for lane, (name, role) in enumerate(lanes):
        samples = strips.series[row.case.id, name]
        median = text.latency(statistics.median(sample.latency_ms for sample in samples))
        _lane(axes, strips, samples, lane, role)
        axes.text(
            1 + (_VALUES - 2) / width,
            lane + 0.5,
            median,
            transform=axes.get_yaxis_transform(),
            color=(role if role is not Role.CONTROL else Role.MUTED).placeholder,
            fontsize=11,
            ha="right",
            va="center_baseline",
        )
        told.append(f"{text.implementation(name)}: median {median} of {text.plural(len(samples), 'sample')}")
    return svg.render(
        fig,
        prefix=f"s{number}",
        title=f"Samples of {row.name} {row.case.dtype}",
        description="; ".join(told),
        sheet=sheet,
    )


def _lane(axes: Axes, strips: Strips, samples: Sequence[Sample], lane: int, role: Role) -> None:
    last = max(samples[-1].block, 1)
    dots = [
        (_place(deviation), lane + 0.14 + 0.72 * sample.block / last)
        for sample, deviation in zip(samples, _deviations(samples), strict=True)
        if sample.block % strips.stride == 0
    ]
    marks.rule(axes, (0, 0), (lane + 0.08, lane + 0.92), role, 1.4, zorder=1)
    # Lines of no length, whose round caps are the dots.
    ends = [end for dot in dots for end in (dot, dot)]
    _stroke(axes, ends, role, linewidth=3, capstyle="round", alpha=0.7)


def _stroke(axes: Axes, ends: Sequence[tuple[float, float]], role: Role, **more: Any) -> None:
    """Separate lines, from the first end to the second and so on, as one path: far shorter than one each."""
    if ends:
        path = Path(ends, [Path.MOVETO, Path.LINETO] * (len(ends) // 2))
        # Fixed when a path is made, not when it is drawn: from 128 ends on, lines of no length would go.
        path.should_simplify = False
        axes.add_patch(PathPatch(path, facecolor="none", edgecolor=role.placeholder, clip_on=False, **more))


def _label(deviation: float) -> str:
    if deviation >= 1:
        return f"{deviation + 1:.0f}×"
    return f"{100 * deviation:+.0f} %".replace("-", "−") if deviation else "0"
