"""What the pictures have in common: marks, scales, text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from cudadent42.model.records import Verdict
from cudadent42.stages.report.svg import Role

ROLE_OF = {
    Verdict.FASTER: Role.FASTER,
    Verdict.SLOWER: Role.SLOWER,
    Verdict.EQUAL: Role.EQUAL,
    Verdict.UNDECIDED: Role.UNDECIDED,
}
MARKER_OF = {Verdict.FASTER: "o", Verdict.SLOWER: "v", Verdict.EQUAL: "s", Verdict.UNDECIDED: "o"}
"""Shapes repeat what the colours say. Undecided is hollow."""

OTHER_ROLES = (Role.OTHER_1, Role.OTHER_2, Role.OTHER_3)
OTHER_MARKERS = ("D", "^", "P")
LANES = 1 + len(OTHER_ROLES)
"""Most implementations beside the baseline that one picture shows; tables show all."""

_NICE = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8)


def write(
    axes: Axes,
    x: float,
    y: float,
    words: str,
    *,
    role: Role = Role.MUTED,
    size: float = 11,
    align: str = "left",
    bold: bool = False,
    coordinates: str = "data",
) -> None:
    """Text at a place in ``data`` or ``axes`` coordinates, or x in data and y in axes (``column``)."""
    transform = {"data": axes.transData, "axes": axes.transAxes, "column": axes.get_xaxis_transform()}[
        coordinates
    ]
    axes.text(
        x,
        y,
        words,
        color=role.placeholder,
        fontsize=size,
        ha=align,
        va="center_baseline",
        fontweight="bold" if bold else "normal",
        transform=transform,
        parse_math=False,
    )


def point(
    axes: Axes, x: float, y: float, verdict: Verdict, *, size: float = 7, gid: str | None = None
) -> None:
    """One result, with the verdict's colour and shape."""
    role = ROLE_OF[verdict]
    face = Role.PAGE if verdict is Verdict.UNDECIDED else role
    mark(axes, x, y, MARKER_OF[verdict], size, role, face=face, gid=gid)


def mark(
    axes: Axes,
    x: float,
    y: float,
    shape: str,
    size: float,
    role: Role,
    *,
    face: Role | None = None,
    gid: str | None = None,
    **more: Any,
) -> None:
    """One marker, filled with its own colour unless ``face`` says otherwise."""
    line = Line2D(
        [x],
        [y],
        marker=shape,
        markersize=size,
        markerfacecolor=(face or role).placeholder,
        markeredgecolor=role.placeholder,
        markeredgewidth=1.4,
        linestyle="none",
        clip_on=False,
        gid=gid,
        **{"zorder": 4, **more},
    )
    axes.add_line(line)


def rule(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], role: Role, width: float = 1, **more: Any
) -> None:
    """A line without markers."""
    axes.add_line(Line2D(xs, ys, color=role.placeholder, linewidth=width, clip_on=False, **more))


def ratio_limits(values: Sequence[float], margin: float) -> tuple[float, float]:
    """Limits of a log axis that holds the values, 1 and the margin around it, with air at both ends."""
    finite = [value for value in values if math.isfinite(value) and value > 0]
    low = min([*finite, 1 - margin, 1.0])
    high = max([*finite, 1 + margin, 1.0])
    air = max((high / low) ** 0.05, 1.004)
    return low / air, high * air


def ratio_ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """Round numbers of a log axis from ``low`` to ``high``: at most ``most``, always with 1."""
    if high / low < 2.2:
        for step in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2):
            first, last = math.ceil((low - 1) / step), math.floor((high - 1) / step)
            if last - first < most:
                return tuple(1 + step * index for index in range(first, last + 1))
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for nice in (_NICE, (1, 1.5, 2, 3, 4, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [n * 10.0**d for d in decades for n in nice if low <= n * 10.0**d <= high]
        if len(ticks) <= most and _apart(ticks, low, high, most):
            return tuple(ticks)
    for step in range(2, len(decades)):
        ticks = [10.0**d for d in decades if d % step == 0 and low <= 10.0**d <= high]
        if len(ticks) <= most:
            return tuple(ticks)
    return (1.0,)


def _apart(ticks: Sequence[float], low: float, high: float, most: int) -> bool:
    least = math.log(high / low) / (1.6 * most)
    return all(math.log(b / a) >= least for a, b in pairwise(ticks))


def tick_label(value: float) -> str:
    return f"{value:.6g}×"
