"""Two profiles side by side: what a change did to the numbers that the diagnosis looks at."""

from __future__ import annotations

from pathlib import Path

from cudadent42.errors import UsageError
from cudadent42.profile import store
from cudadent42.profile.diagnosis import shown
from cudadent42.profile.quantities import quantities
from cudadent42.profile.records import Profile, Source

_SHOWN = (
    ("time", "time_s", "ms"),
    ("tensor cores busy", "tensor_share", "%"),
    ("memory busy", "dram_share", "%"),
    ("issue slots used", "issue_share", "%"),
    ("special function unit busy", "xu_share", "%"),
    ("shared-memory conflicts", "bank_conflicts", "%"),
    ("waiting for loads", "long_scoreboard_share", "%"),
    ("waiting at barriers", "barrier_share", "%"),
    ("instructions", "instructions", "count"),
    ("bytes from and to memory", "dram_bytes", "bytes"),
    ("of the roofline", "roof_share", "%"),
)
"""What it is called, the quantity, and how it is shown."""
_SAME = 0.02
"""Relative change below which a number counts as the same."""


def load(folder: Path) -> Profile:
    """The folder's profile. Raises UsageError where it has none."""
    profile = store.load_profile(folder)
    if profile is None:
        raise UsageError(f"{folder} has no profile; make one with: cudadent42 doctor {folder}")
    return profile


def compare_folders(before: Path, after: Path) -> tuple[str, ...]:
    """The changes in lines. Raises UsageError where one of them has no profile."""
    return changes(load(before), load(after))


def changes(before: Profile, after: Profile) -> tuple[str, ...]:
    """What is different in ``after``, one line each; a first line says where the two cannot be compared."""
    lines = [] if before.case == after.case else [f"careful: {before.case} before, {after.case} after"]
    if Source.MODEL in (before.source, after.source) and before.source is not after.source:
        lines.append("careful: only one of the two has counters")
    old, new = quantities(before), quantities(after)
    for words, name, style in _SHOWN:
        if name in old and name in new:
            line = _change(words, style, old[name].value, new[name].value)
            lines += [line] if line else []
    return tuple(lines or ["no number changed by more than 2 %"])


def _change(words: str, style: str, old: float, new: float) -> str:
    largest = max(abs(old), abs(new))
    if largest == 0 or abs(new - old) <= _SAME * largest:
        return ""
    if style == "ms":
        factor = f" ({old / new:.2f}x as fast)" if new > 0 else ""
        return f"{words}: {old * 1e3:.4g} ms -> {new * 1e3:.4g} ms{factor}"
    return f"{words}: {shown(old, style)} -> {shown(new, style)}"
