"""Pictures of a profile: its kernel on the roofline, and what its warps wait for; an earlier one beside it."""

from __future__ import annotations

import math

from cudadent42.model import text
from cudadent42.profiles.metrics import STALLS
from cudadent42.profiles.quantities import call_seconds, peak_copy_gbps, peak_gflops, quantities
from cudadent42.profiles.records import Profile
from cudadent42.stages.report import svg
from cudadent42.stages.report.figures import marks
from cudadent42.stages.report.figures.roofline import Frame, draw_ceilings, draw_grid
from cudadent42.stages.report.svg import Role
from cudadent42.stages.report.view import Profiled

_WIDE, _NARROW = 1040.0, 360.0
_SHOWN_STALLS = 9
"""The largest; what is left is one bar."""
_LANE = 26.0
_WORDS = {
    "selected": "issuing",
    "long_scoreboard": "loads from memory and L2",
    "short_scoreboard": "shared memory, exp2",
    "mio_throttle": "queue of shared memory and exp2",
    "lg_throttle": "queue of loads and stores",
    "math_pipe_throttle": "a busy arithmetic unit",
    "barrier": "barriers",
    "membar": "memory fences",
    "wait": "fixed latency of the last instruction",
    "not_selected": "another warp was chosen",
    "gmma": "wgmma",
    "dispatch_stall": "dispatch",
    "no_instruction": "instructions to arrive",
    "imc_miss": "constants to arrive",
    "branch_resolving": "branches",
    "sleeping": "sleeping",
    "drain": "stores to drain at the end",
    "tex_throttle": "queue of textures",
    "misc": "other",
}


def stalls(view: Profiled, sheet: svg.Sheet, *, wide: bool) -> str:
    """A bar per reason, largest first, and under it the earlier profile's; empty without counters."""
    now = stall_shares(view.profile)
    if not now:
        return ""
    before = stall_shares(view.before) if view.before is not None else {}
    names = sorted(now, key=lambda name: -max(now[name], before.get(name, 0.0)))[:_SHOWN_STALLS]
    rest = 1 - sum(now[name] for name in names)
    rows = [(_WORDS[name], now[name], before.get(name)) for name in names]
    if rest > 0.005:
        left = 1 - sum(before.get(name, 0.0) for name in names) if before else None
        rows.append(("everything else", rest, left))
    width, label = (_WIDE, 250.0) if wide else (_NARROW, 4.0)
    lane = _LANE + (10 if before else 0) + (0 if wide else 18)
    fig = svg.figure(width, lane * len(rows) + 8)
    axes = svg.panel(fig, label, 0, width - label - 60, lane * len(rows))
    axes.set_axis_off()
    most = max(max(share, old or 0.0) for _, share, old in rows)
    axes.set_xlim(0, most)
    axes.set_ylim(len(rows), 0)
    for y, (words, share, old) in enumerate(rows):
        top = 0.14 if wide else 0.46
        height = (0.86 - top) / (2 if before else 1)
        if wide:
            marks.write(axes, -0.012 * most, y + 0.5, words, role=Role.INK, size=12, align="right")
        else:
            marks.write(axes, 0, y + 0.22, words, role=Role.INK, size=11)
        for index, (value, role) in enumerate(((share, Role.CANDIDATE), (old, Role.CONTROL))):
            if value is None:
                continue
            middle = y + top + height * (index + 0.5)
            axes.barh(middle, value, height=0.9 * height, color=role.placeholder, linewidth=0)
            marks.write(axes, value + 0.008 * most, middle, f"{100 * value:.0f} %", size=11)
    return svg.render(
        fig,
        prefix=f"stalls-{'wide' if wide else 'narrow'}",
        title="What warps wait for, by share of their time",
        description="; ".join(f"{words} {100 * share:.0f} %" for words, share, _ in rows),
        sheet=sheet,
        css_class="wide" if wide else "narrow",
    )


def stall_shares(profile: Profile) -> dict[str, float]:
    """Shares by reason; empty where they were not counted."""
    available = quantities(profile)
    return {name: available[f"{name}_share"].value for name in STALLS if f"{name}_share" in available}


def roofline(view: Profiled, sheet: svg.Sheet, *, wide: bool) -> str:
    """The kernel's rate at its intensity under the measured ceilings; empty where operations or times are unknown.

    The intensity is that of the fewest bytes; with counters, a smaller mark shows that of the bytes that were moved.
    """
    points = _points(view.profile, Role.CANDIDATE, Role.CANDIDATE)
    if view.before is not None:
        points = [*_points(view.before, Role.BASELINE, Role.PAGE), *points]
    if not points:
        return ""
    peak, copy = peak_gflops(view.profile), peak_copy_gbps(view.profile)
    xs, ys = [x for x, *_ in points], [y for _, y, *_ in points]
    if math.isfinite(peak):
        ys.append(peak)
        if copy > 0:
            xs.append(peak / copy)
    frame = Frame((min(xs) / 2.5, max(xs) * 2.5), (min(ys) / 2.5, max(ys) * 1.5), 10 if wide else 5)
    width, height, left = (_WIDE, 300.0, 74.0) if wide else (_NARROW, 240.0, 66.0)
    fig = svg.figure(width, height + 72)
    axes = svg.panel(fig, left, 26, width - left - 12, height)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_axis_off()
    axes.set_xlim(*frame.intensity)
    axes.set_ylim(*frame.rate)
    draw_grid(axes, frame, height)
    compute_peak = (view.profile.dtype, peak) if math.isfinite(peak) else None
    draw_ceilings(axes, frame, compute_peak, copy)
    tips: dict[int, str] = {}
    for x, y, size, role, face, words in points:
        tips[len(tips)] = words
        marks.mark(axes, x, y, "o", size, role, face=face, gid=svg.tip(len(tips) - 1))
    return svg.render(
        fig,
        prefix=f"profile-roofline-{'wide' if wide else 'narrow'}",
        title="Roofline of the profiled kernel",
        description="; ".join(words for *_, words in points),
        sheet=sheet,
        tips=tips if wide else None,
        css_class="wide" if wide else "narrow",
    )


def _points(profile: Profile, role: Role, face: Role) -> list[tuple[float, float, float, Role, Role, str]]:
    """Intensity, GFLOP/s, size and colours of a profile's marks, with words."""
    time = call_seconds(profile)
    if not (profile.flops > 0 and profile.bytes_min > 0 and time > 0):
        return []
    rate = profile.flops / time * 1e-9
    name = f"{text.clean(profile.case)}, {text.implementation(profile.implementation)}"
    points = [
        (
            profile.flops / profile.bytes_min,
            rate,
            8.0,
            role,
            face,
            f"{name}: {text.figures(rate)} GFLOP/s by the fewest bytes",
        )
    ]
    moved = quantities(profile).get("dram_excess")
    of_all = len(profile.launches) <= 1  # one kernel's traffic says nothing of the others'
    if moved is not None and moved.value > 0 and of_all:
        intensity = profile.flops / (moved.value * profile.bytes_min)
        points.append((intensity, rate, 5.0, role, face, f"{name}: by the bytes that memory moved"))
    return points
