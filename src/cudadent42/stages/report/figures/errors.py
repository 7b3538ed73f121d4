"""Every verified error as a share of its bound, by norm."""

from __future__ import annotations

import math

from cudadent42.model import text
from cudadent42.stages.report import svg
from cudadent42.stages.report.cases import AFTER_TIMING, RANDOM, shares_of_bound
from cudadent42.stages.report.figures import marks
from cudadent42.stages.report.svg import Role
from cudadent42.stages.report.view import View

_NORMS = ("worst element", "root mean square", "worst row")
_LANE = 46.0
_FOOT = 26.0


def errors(view: View, sheet: svg.Sheet | None, *, wide: bool) -> str:
    """One lane per norm, one mark per check; empty where no check has a bound. Without a sheet it stands alone."""
    checks = [(entry, shares_of_bound(entry)) for entry in view.checked]
    checks = [(entry, shares) for entry, shares in checks if not all(math.isnan(share) for share in shares)]
    if not checks:
        return ""
    width, left = (1040.0, 130.0) if wide else (360.0, 4.0)
    most = max(share for _, shares in checks for share in shares if not math.isnan(share))
    limit = 1.5 if most > 1 else 1.05
    lane = _LANE if wide else _LANE + 12
    fig = svg.figure(width, 3 * lane + _FOOT)
    axes = svg.panel(fig, left, 0, width - left - 20, 3 * lane)
    axes.set_axis_off()
    axes.set_xlim(0, limit)
    axes.set_ylim(3, 0)
    axes.axvspan(0, 1, color=Role.BAND.placeholder, linewidth=0, zorder=0)
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        end = tick == 1
        marks.rule(axes, (tick, tick), (0, 3), Role.INK if end else Role.RULE, 1.2 if end else 0.8, zorder=1)
        words = "bound" if end else f"{tick:.0%}".replace("%", " %")
        marks.write(axes, tick, 3 + 14 / lane, words, align="center" if tick else "left")
    tips: dict[int, str] = {}
    for norm, name in enumerate(_NORMS):
        if wide:
            marks.write(axes, -0.012 * limit, norm + 0.5, name, role=Role.INK, size=12, align="right")
        else:
            marks.write(axes, 0.01 * limit, norm + 0.16, name, role=Role.INK, size=11)
        if norm:
            marks.rule(axes, (0, limit), (norm, norm), Role.PAGE, 2, zorder=1)
        for index, (entry, shares) in enumerate(checks):
            share = shares[norm]
            if math.isnan(share):
                continue
            number = 3 * index + norm
            # One tip for a check, on the norm that comes closest to its bound: the table has the rest.
            if share == max(each for each in shares if not math.isnan(each)):
                who = text.implementation(entry.implementation)
                tips[number] = text.clean(
                    f"{entry.case}, {who}, {entry.input}: {text.figures(100 * share)} % of the bound"
                )
            random = entry.input in (RANDOM, AFTER_TIMING)
            role = Role.SLOWER if share > 1 else Role.CANDIDATE if random else Role.OTHER_1
            y = norm + (0.2 if wide else 0.34) + 0.6 * (index * 0.618 % 1)
            shape, size = ("o", 4) if random else ("D", 3.4)
            marks.mark(axes, min(share, limit), y, shape, size, role, gid=svg.tip(number), alpha=0.75)
    return svg.render(
        fig,
        prefix=f"errors-{'wide' if wide else 'narrow'}",
        title="Error against float64 as a share of its bound",
        description=view.verification_line,
        sheet=sheet,
        tips=tips if wide else None,
        css_class="wide" if wide else "narrow",
    )
