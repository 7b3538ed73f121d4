"""The pictures of a tuning: survivors over blocks, a slice of two parameters, the ratio by case and by region."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.patches import Rectangle

from cudadent42.decisions.racing import gain
from cudadent42.model import text
from cudadent42.stages.report import svg
from cudadent42.stages.report.figures import marks
from cudadent42.stages.report.svg import Role
from cudadent42.tune.journal import Confirmed
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import CaseState, State
from cudadent42.tune.table import least_certain, winning_areas

_WIDTH = 640.0
_ROLES = (Role.CANDIDATE, Role.OTHER_1, Role.OTHER_2, Role.OTHER_3, Role.BASELINE)
_MOST_LABELS = 12
"""Of lines: more do not fit beside them."""
_FULL_COLOUR = 0.2
"""Logarithm of the ratio at which a cell of the slice has its full colour."""


def survivors(state: State, sheet: svg.Sheet) -> str:
    """How many configurations were still raced, by the blocks that each had; empty where nothing was raced."""
    cases = [case for case in state.cases.values() if len(case.raced) > 1]
    if not cases:
        return ""
    height, left, foot = 240.0, 52.0, 44.0
    fig = svg.figure(_WIDTH, height + foot)
    axes = svg.panel(fig, left, 14, _WIDTH - left - 150, height - 14)
    rungs = state.setup.rules.rungs
    most = max(len(case.raced) - 1 for case in cases)
    axes.set_xlim(0, rungs[-1])
    axes.set_ylim(0, most * 1.05)
    for blocks in (0, *rungs):
        marks.rule(axes, (blocks, blocks), (0, most * 1.05), Role.RULE, 0.8, zorder=1)
        marks.write(axes, blocks, -0.06, str(blocks), align="center", coordinates="column")
    for count in sorted({0, most // 2, most}):
        axes.text(
            -rungs[-1] * 0.015,
            count,
            str(count),
            color=Role.MUTED.placeholder,
            fontsize=11,
            ha="right",
            va="center",
        )
    marks.write(
        axes, rungs[-1] / 2, -0.15, "blocks that a configuration has", align="center", coordinates="column"
    )
    ends: list[float] = []
    # Cases that went alike share a line, which would hide all but one of theirs.
    alike: dict[tuple[float, ...], list[CaseState]] = {}
    for case in cases:
        alike.setdefault(tuple(_steps(case, rungs)[1]), []).append(case)
    for number, together in enumerate(alike.values()):
        xs, ys = _steps(together[0], rungs)
        role = _ROLES[number % len(_ROLES)]
        marks.rule(axes, xs, ys, role, 2, zorder=3)
        height = ys[-1]
        while any(abs(height - other) < most * 0.07 for other in ends):
            height += most * 0.07
        ends.append(height)
        if number < _MOST_LABELS:
            name = text.shorten(together[0].case, 20) if len(together) == 1 else f"{len(together)} cases"
            marks.write(axes, xs[-1] + rungs[-1] * 0.02, height, name, role=role)
    return svg.render(
        fig,
        prefix="survivors",
        title="Configurations that are still raced",
        description="; ".join(
            f"{case.case}: {len(case.raced) - 1} to {len(case.alive) - 1}" for case in cases
        ),
        sheet=sheet,
    )


def _steps(case: CaseState, rungs: Sequence[int]) -> tuple[list[float], list[float]]:
    count = len(case.raced) - 1
    xs, ys = [0.0], [float(count)]
    for rung, blocks in enumerate(rungs[: case.rung]):
        xs.append(float(blocks))
        ys.append(float(count))
        count -= sum(departure.rung == rung for departure in case.departed)
        xs.append(float(blocks))
        ys.append(float(count))
    return xs, ys


def heat_map(state: State, case: CaseState, sheet: svg.Sheet, number: int) -> str:
    """The ratio to the default over the two parameters with the most values, the others as the leader has them; empty
    where there are no two."""
    settings = state.setup.settings
    values: dict[str, list[object]] = {}
    for each in settings.values():
        for name, value in each.items():
            if value not in values.setdefault(name, []):
                values[name].append(value)
    names = sorted(
        (name for name, own in values.items() if len(own) > 1), key=lambda name: -len(values[name])
    )
    measured = [arm for arm in case.rows if arm != DEFAULT and case.rows[arm]]
    if len(names) < 2 or not measured:
        return ""
    x_name, y_name = names[0], names[1]
    best = (
        case.leader
        if case.leader != DEFAULT
        else max(measured, key=lambda arm: gain(case.rows[arm], 0.5).centre)
    )
    fixed = {name: value for name, value in settings[best].items() if name not in (x_name, y_name)}
    columns, rows = values[x_name], values[y_name]
    cell_width, cell_height, left, foot = 74.0, 32.0, 110.0, 44.0
    width, height = left + cell_width * len(columns) + 10, cell_height * len(rows)
    fig = svg.figure(width, height + foot + 8)
    axes = svg.panel(fig, left, 8, cell_width * len(columns), height)
    axes.set_xlim(0, len(columns))
    axes.set_ylim(0, len(rows))
    for y, row in enumerate(rows):
        axes.text(
            -0.1,
            y + 0.5,
            f"{y_name} {row}",
            color=Role.MUTED.placeholder,
            fontsize=11,
            ha="right",
            va="center",
        )
        for x, column in enumerate(columns):
            wanted = {**fixed, x_name: column, y_name: row}
            arm = next((name for name, own in settings.items() if own == wanted), None)
            ratio = math.exp(gain(case.rows[arm], 0.5).centre) if arm and case.rows.get(arm) else math.nan
            _cell(axes, x, y, ratio)
    for x, column in enumerate(columns):
        marks.write(
            axes, x + 0.5, -0.25 * 2 / max(2, len(rows)), f"{column}", align="center", coordinates="column"
        )
    marks.write(
        axes, len(columns) / 2, -0.55 * 2 / max(2, len(rows)), x_name, align="center", coordinates="column"
    )
    others = ", ".join(f"{name}={value}" for name, value in fixed.items())
    return svg.render(
        fig,
        prefix=f"slice-{number}",
        title=f"{case.case}: ratio to the default by {x_name} and {y_name}"
        + (f", at {others}" if others else ""),
        description=f"{len(measured)} configurations were measured.",
        sheet=sheet,
    )


def _cell(axes: object, x: int, y: int, ratio: float) -> None:
    role = Role.BAND if not math.isfinite(ratio) else Role.FASTER if ratio >= 1 else Role.SLOWER
    strength = 1.0 if not math.isfinite(ratio) else min(1.0, abs(math.log(ratio)) / _FULL_COLOUR)
    assert hasattr(axes, "add_patch")
    axes.add_patch(
        Rectangle(
            (x + 0.03, y + 0.06),
            0.94,
            0.88,
            facecolor=role.placeholder,
            alpha=0.15 + 0.5 * strength if math.isfinite(ratio) else 0.6,
            linewidth=0,
        )
    )
    words = text.ratio(ratio) if math.isfinite(ratio) else "–"
    marks.write(axes, x + 0.5, y + 0.5, words, role=Role.INK, align="center")  # type: ignore[arg-type]


def ratios(state: State, sheet: svg.Sheet) -> str:
    """The confirmed ratio of every case, with its interval; empty where nothing was confirmed."""
    confirmed = [case.confirmed for case in state.cases.values() if case.confirmed is not None]
    return _intervals(
        [(each.case, each) for each in confirmed],
        "ratios",
        "The winner against the default, confirmed in a fresh race",
        state.setup.rules.margin,
        sheet,
    )


def regions(state: State, sheet: svg.Sheet) -> str:
    """The ratio of every region that would be installed, that of its least certain case; empty where there is none."""
    return _intervals(
        [
            (f"{number}: {area.winner}", least_certain(state, area))
            for number, area in enumerate(winning_areas(state), 1)
        ],
        "regions",
        "What is installed against the default, by region",
        state.setup.rules.margin,
        sheet,
    )


def _intervals(
    rows: Sequence[tuple[str, Confirmed]], prefix: str, title: str, margin: float, sheet: svg.Sheet
) -> str:
    rows = [
        (name, each)
        for name, each in rows
        if math.isfinite(each.ratio) and math.isfinite(each.high) and each.low > 0
    ]
    if not rows:
        return ""
    left, row_height, foot = 190.0, 30.0, 30.0
    height = row_height * len(rows)
    fig = svg.figure(_WIDTH, height + foot + 8)
    axes = svg.panel(fig, left, 8, _WIDTH - left - 16, height)
    low, high = marks.ratio_limits([end for _, each in rows for end in (each.low, each.high)], margin)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks([])
    axes.set_xlim(low, high)
    axes.set_ylim(len(rows), 0)
    axes.axvspan(1 / (1 + margin), 1 + margin, color=Role.BAND.placeholder, linewidth=0, zorder=0)
    for tick in marks.ratio_ticks(low, high, 7):
        marks.rule(axes, (tick, tick), (0, len(rows)), Role.RULE, 0.8, zorder=1)
        marks.write(axes, tick, -14 / height, f"{tick:.4g}×", align="center", coordinates="column")
    for y, (name, each) in enumerate(rows):
        role = marks.ROLE_OF[each.verdict]
        marks.rule(axes, (each.low, each.high), (y + 0.5, y + 0.5), role, 2, zorder=3)
        marks.point(axes, each.ratio, y + 0.5, each.verdict)
        axes.text(
            -0.02,
            y + 0.5,
            text.shorten(name, 26),
            transform=axes.get_yaxis_transform(),
            color=Role.INK.placeholder,
            fontsize=11,
            ha="right",
            va="center_baseline",
        )
    mean = math.exp(float(np.mean([math.log(each.ratio) for _, each in rows])))
    return svg.render(
        fig,
        prefix=prefix,
        title=title,
        description=f"Geometric mean {text.ratio(mean)}",
        sheet=sheet,
    )
