"""Two profiles side by side: what a change did to the numbers that the diagnosis looks at."""

from __future__ import annotations

from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.profiles import store
from cudadent42.profiles.diagnosis import shown
from cudadent42.profiles.quantities import quantities
from cudadent42.profiles.records import PROFILE, Clock, Profile, Source
from cudadent42.profiles.times import times

_SHOWN = (
    ("tensor cores busy", "tensor_share", "%"),
    ("memory busy", "dram_share", "%"),
    ("L2 busy", "l2_share", "%"),
    ("issue slots used", "issue_share", "%"),
    ("special function unit busy", "xu_share", "%"),
    ("integer and logic busy", "alu_share", "%"),
    ("shared-memory conflicts", "bank_conflicts", "%"),
    ("waiting for loads", "long_scoreboard_share", "%"),
    ("waiting at barriers", "barrier_share", "%"),
    ("instructions", "instructions", "count"),
    ("bytes from and to memory", "dram_bytes", "bytes"),
    ("of the roofline", "roof_share", "%"),
    ("bytes spilled per thread", "spill_bytes", "count"),
    ("instructions in the compiled kernel", "static_total", "count"),
    ("exponentials that nothing hides", "ablation_exponentials", "%"),
    ("mask that nothing hides", "ablation_mask", "%"),
    ("loads that nothing hides", "ablation_loads", "%"),
    ("sums in global memory that nothing hides", "ablation_sums", "%"),
)
"""What it is called, the quantity, and how it is shown."""
_SAME = 0.02
"""Relative change below which a number counts as the same."""
_CLOCKS = {
    Clock.COUNTED: "under Nsight Compute",
    Clock.TRACED: "in the driver's trace",
    Clock.CALLED: "called",
}
"""The times that are set side by side, the first that both have."""


def load(folder: Path) -> Profile:
    """The folder's profile. Raises UsageError where it has none."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; expected a folder that has a {PROFILE}")
    profile = store.load_profile(folder)
    if profile is None:
        raise UsageError(f"{folder} has no profile; make one with: cudadent42 doctor {folder}")
    return profile


def changes(before: Profile, after: Profile) -> tuple[str, ...]:
    """What is different in ``after``, one line each; the first lines say why the two cannot be compared."""
    old, new = quantities(before), quantities(after)
    sentences = [_time(before, after)]
    for words, name, style in _SHOWN:
        if name in old and name in new:
            sentences.append(_change(words, style, old[name].value, new[name].value))
    lines = [line for line in sentences if line]
    of_one = [words for words, name, _ in _SHOWN if (name in old) != (name in new)]
    if of_one:
        lines.append(f"not compared, since only one of the two profiles has them: {', '.join(of_one)}")
    return (*_careful(before, after), *(lines or ["no number changed by more than 2 %"]))


def _careful(before: Profile, after: Profile) -> list[str]:
    """What else than the change may make the numbers differ."""
    pairs = (
        ("", before.case, after.case),
        ("", before.implementation, after.implementation),
        ("measured on ", before.device_name, after.device_name),
        ("read by ", before.tool, after.tool),
    )
    lines = [
        f"careful: {words}{old} before, {new} after"
        for words, old, new in pairs
        if old != new and old and new
    ]
    if Source.MODEL in (before.source, after.source) and before.source is not after.source:
        lines.append("careful: only one of the two has counters")
    return lines


def _time(before: Profile, after: Profile) -> str:
    """Of one clock, whichever is the best that both have."""
    old = {one.clock: one.latency_ms for one in times(before)}
    new = {one.clock: one.latency_ms for one in times(after)}
    clock = next((clock for clock in _CLOCKS if clock in old and clock in new), None)
    if clock is None:
        return "time: no clock measured both"
    if _same(old[clock], new[clock]):
        return ""
    # The times of two cases are no speed-up.
    factor = f" ({old[clock] / new[clock]:.2f}x as fast)" if before.case == after.case else ""
    return f"time {_CLOCKS[clock]}: {old[clock]:.4g} ms -> {new[clock]:.4g} ms{factor}"


def _change(words: str, style: str, old: float, new: float) -> str:
    before, after = shown(old, style), shown(new, style)
    return "" if _same(old, new) or before == after else f"{words}: {before} -> {after}"


def _same(old: float, new: float) -> bool:
    return abs(new - old) <= _SAME * max(abs(old), abs(new))
