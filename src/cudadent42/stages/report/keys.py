"""Legends: the marks of the pictures as small inline SVG, with words."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from cudadent42.model import text
from cudadent42.model.records import Verdict
from cudadent42.profiles.quantities import quantities
from cudadent42.stages.report.figures import marks
from cudadent42.stages.report.figures.samples import Strips
from cudadent42.stages.report.figures.speedup import control_shown
from cudadent42.stages.report.svg import Role
from cudadent42.stages.report.view import Profiled, View

_SHAPES = {
    "o": '<circle cx="8" cy="8" r="4.5" {0}/>',
    "v": '<path d="M3 4h10l-5 8z" {0}/>',
    "^": '<path d="M3 12h10l-5-8z" {0}/>',
    "s": '<rect x="3.5" y="3.5" width="9" height="9" {0}/>',
    "D": '<path d="M8 2.5 13.5 8 8 13.5 2.5 8z" {0}/>',
    "P": '<path d="M6 2h4v4h4v4h-4v4h-4v-4h-4v-4h4z" {0}/>',
}


@dataclass(frozen=True)
class Entry:
    mark: Markup
    label: str


def speedup_key(view: View) -> list[Entry]:
    """Verdicts that occur, the control, and the other implementations."""
    entries = [
        Entry(
            _mark(marks.MARKER_OF[v], marks.ROLE_OF[v], hollow=v is Verdict.UNDECIDED),
            f"{view.candidate}, {v.value}" if number == 0 else v.value,
        )
        for number, v in enumerate(view.verdicts)
    ]
    if control_shown(view):
        entries.append(Entry(_mark("o", Role.CONTROL, small=True), f"{view.baseline} against itself"))
    for lane, name in enumerate(view.other_names[: marks.LANES - 1]):
        entries.append(
            Entry(_mark(marks.OTHER_MARKERS[lane], marks.OTHER_ROLES[lane]), text.implementation(name))
        )
    return entries


def lane_key(view: View, strips: Strips) -> list[Entry]:
    """Implementations in the samples' panels, from top to bottom."""
    control = view.control_name
    return [
        Entry(
            _mark("o", role), "control (the baseline again)" if name == control else text.implementation(name)
        )
        for name, role in strips.lanes
    ]


def roofline_key(view: View) -> list[Entry]:
    """Filled and hollow."""
    return [
        Entry(_mark("o", Role.CANDIDATE), view.candidate),
        Entry(_mark("o", Role.BASELINE, hollow=True), view.baseline),
    ]


def profile_key(view: Profiled) -> list[Entry]:
    """The profile, the earlier one where there is one, and the smaller mark where it is drawn."""
    entries = [Entry(_mark("o", Role.CANDIDATE), text.implementation(view.profile.implementation))]
    if view.before is not None:
        entries.append(Entry(_mark("o", Role.BASELINE, hollow=True), "before"))
    if "dram_excess" in quantities(view.profile) and len(view.profile.launches) <= 1:
        entries.append(Entry(_mark("o", Role.CANDIDATE, small=True), "by the bytes that memory moved"))
    return entries


def bar_key(view: Profiled) -> list[Entry]:
    """As ``profile_key``, for bars; empty where one bar needs no key."""
    if view.before is None:
        return []
    return [
        Entry(_mark("s", Role.CANDIDATE), text.implementation(view.profile.implementation)),
        Entry(_mark("s", Role.CONTROL), "before"),
    ]


def error_key(view: View) -> list[Entry]:
    """Random and adversarial inputs, and failures where there are any."""
    entries = [
        Entry(_mark("o", Role.CANDIDATE), "random input"),
        Entry(_mark("D", Role.OTHER_1), "adversarial input"),
    ]
    if view.failures:
        entries.append(Entry(_mark("o", Role.SLOWER), "beyond the bound (cut at the edge)"))
    return entries


def _mark(shape: str, role: Role, *, hollow: bool = False, small: bool = False) -> Markup:
    paint = f'class="f-page s-{role.word}" stroke-width="1.6"' if hollow else f'class="f-{role.word}"'
    if small:
        paint += ' transform="translate(3.2 3.2) scale(.6)"'
    # Built from constants only.
    return Markup(f'<svg viewBox="0 0 16 16" aria-hidden="true">{_SHAPES[shape].format(paint)}</svg>')
