"""The A/A control: the baseline against itself, which a fair measurement calls equal."""

from __future__ import annotations

from cudadent42.model import text
from cudadent42.stages.report import svg
from cudadent42.stages.report.figures import marks
from cudadent42.stages.report.svg import Role
from cudadent42.stages.report.view import View

_HEIGHT = 170.0
_LEFT = 52.0
_FOOT = 24.0


def control(view: View, sheet: svg.Sheet | None, *, wide: bool) -> str:
    """Ratio and interval of every control comparison; empty where the run had none. Without a sheet it stands alone."""
    rows = [row for row in view.rows if row.control]
    results = view.run.results
    if not rows or results is None:
        return ""
    width = 1040.0 if wide else 360.0
    ends = [end for row in rows if row.control for end in (row.control.ci_low, row.control.ci_high)]
    floor = results.noise_floor
    low, high = marks.ratio_limits([*ends, 1 - floor, 1 + floor], results.margin)
    fig = svg.figure(width, _HEIGHT + _FOOT)
    axes = svg.panel(fig, _LEFT, 8, width - _LEFT - 8, _HEIGHT - 8)
    axes.set_axis_off()
    axes.set_yscale("log")
    axes.set_xlim(-0.7, len(rows) - 0.3)
    axes.set_ylim(low, high)
    axes.axhspan(1 - results.margin, 1 + results.margin, color=Role.BAND.placeholder, linewidth=0, zorder=0)
    for tick in marks.ratio_ticks(low, high, 7):
        one = abs(tick - 1) < 1e-9
        marks.rule(
            axes, axes.get_xlim(), (tick, tick), Role.INK if one else Role.RULE, 1.2 if one else 0.8, zorder=1
        )
        axes.text(
            -8 / (width - _LEFT - 8),
            tick,
            f"{tick:.4g}×",
            transform=axes.get_yaxis_transform(),
            color=Role.MUTED.placeholder,
            fontsize=11,
            ha="right",
            va="center_baseline",
        )
    for level in (1 - floor, 1 + floor):
        if level > 0:  # neither NaN nor off a log scale
            marks.rule(axes, axes.get_xlim(), (level, level), Role.MUTED, 1, linestyle=(0, (4, 3)), zorder=1)
    tips = {}
    for x, row in enumerate(rows):
        comparison = row.control
        if comparison is None:
            continue
        role = marks.ROLE_OF[comparison.verdict]
        marks.rule(axes, (x, x), (comparison.ci_low, comparison.ci_high), role, 2, zorder=3)
        interval = text.interval(comparison.ci_low, comparison.ci_high)
        tips[x] = f"{row.name} {row.case.dtype}: {text.ratio(comparison.speedup)} ({interval})"
        marks.point(axes, x, comparison.speedup, comparison.verdict, size=6, gid=svg.tip(x))
    for dtype in view.dtypes:
        columns = [x for x, row in enumerate(rows) if row.case.dtype == dtype]
        if columns:
            middle = (columns[0] + columns[-1]) / 2
            marks.write(axes, middle, -0.08, text.clean(dtype), align="center", coordinates="column")
    return svg.render(
        fig,
        prefix=f"control-{'wide' if wide else 'narrow'}",
        title=f"{view.baseline} against itself, every case",
        description=f"Noise floor {text.percent(floor)}; {text.plural(len(rows), 'case')}.",
        sheet=sheet,
        tips=tips if wide else None,
        css_class="wide" if wide else "narrow",
    )
