"""A case's speed-up over its runs: a panel a track, a mark a run with its interval, machines apart."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cudadent42.model import text
from cudadent42.model.history import Track
from cudadent42.model.records import Verdict
from cudadent42.stages.report import svg
from cudadent42.stages.report.figures import marks
from cudadent42.stages.report.svg import Role

_WIDTH = 1040.0
_LEFT = 60.0
_RIGHT = 20.0
_HEAD = 52.0
_HEIGHT = 190.0
_FOOT = 52.0
_MOST_LABELS = 12
"""Dates and revisions below a panel; every run has its own in the tooltip."""
_MOST_TICKS = 7
MOST_PANELS = 12
"""Of one page. Each race of two versions is a track of its own."""
_LETTER = 7.0
"""Width of one in a machine's name, on average."""
_FEWEST_LETTERS = 8
"""Of a machine's name, however little room there is."""


def history(tracks: Sequence[Track], name: str, sheet: svg.Sheet | None = None) -> str:
    """The picture, for a page with that sheet or on its own. ``tracks`` is not empty."""
    block = _HEAD + _HEIGHT + _FOOT
    fig = svg.figure(_WIDTH, block * len(tracks))
    tips: dict[int, str] = {}
    for number, track in enumerate(tracks):
        _panel(fig, track, number * block, tips)
    return svg.render(
        fig,
        prefix="history",
        title=f"Speed-up of {name} over its runs",
        description="A mark for each run, with its 95 % interval; dashed lines where the machine changed.",
        sheet=sheet,
        tips=tips,
    )


def _panel(fig: Figure, track: Track, top: float, tips: dict[int, str]) -> None:
    width = _WIDTH - _LEFT - _RIGHT
    axes = svg.panel(fig, _LEFT, top + _HEAD, width, _HEIGHT)
    axes.set_axis_off()
    axes.set_yscale("log")
    count = len(track.points)
    low, high = marks.ratio_limits([end for p in track.points for end in (p.ci_low, p.ci_high)], 0.0)
    axes.set_xlim(-0.6, count - 0.4)
    axes.set_ylim(low, high)
    for tick in marks.ratio_ticks(low, high, _MOST_TICKS):
        one = abs(tick - 1) < 1e-9
        role, thickness = (Role.INK, 1.2) if one else (Role.RULE, 0.8)
        marks.rule(axes, axes.get_xlim(), (tick, tick), role, thickness, zorder=1)
        axes.text(
            -8 / width,
            tick,
            marks.tick_label(tick),
            transform=axes.get_yaxis_transform(),
            color=Role.MUTED.placeholder,
            fontsize=11,
            ha="right",
            va="center_baseline",
        )
    title = text.shorten(text.clean(track.title), 120)
    marks.write(axes, 0, 1 + 36 / _HEIGHT, title, role=Role.INK, size=13, bold=True, coordinates="axes")
    _machines(axes, track)
    spacing = max(1, -(-count // _MOST_LABELS))
    for x, point in enumerate(track.points):
        role = marks.ROLE_OF[Verdict(point.verdict)]
        marks.rule(axes, (x, x), (point.ci_low, point.ci_high), role, 2, zorder=3)
        number = len(tips)
        tips[number] = (
            f"{point.started[:16]} {point.revision} on {point.machine}: {text.ratio(point.speedup)} "
            f"({text.interval(point.ci_low, point.ci_high)}), {point.verdict}"
        )
        marks.point(axes, x, point.speedup, Verdict(point.verdict), size=6.5, gid=svg.tip(number))
        if x % spacing == 0:
            marks.write(
                axes, x, -16 / _HEIGHT, point.started[:10], size=10, align="center", coordinates="column"
            )
            revision = text.shorten(text.clean(point.revision), 14)
            marks.write(axes, x, -31 / _HEIGHT, revision, size=10, align="center", coordinates="column")


def _machines(axes: Axes, track: Track) -> None:
    """The name of each machine over its runs, and a line where it changes."""
    begins = (0, *track.changes)
    letters_a_run = (_WIDTH - _LEFT - _RIGHT) / len(track.points) / _LETTER
    for begin, end in zip(begins, (*track.changes, len(track.points)), strict=True):
        room = max(_FEWEST_LETTERS, int(letters_a_run * (end - begin)))
        name = text.shorten(text.clean(track.points[begin].machine), room)
        marks.write(axes, begin - 0.45, 1 + 14 / _HEIGHT, name, size=11, coordinates="column")
    for change in track.changes:
        axes.axvline(change - 0.5, color=Role.MUTED.placeholder, linewidth=1, linestyle=(0, (4, 3)), zorder=2)
