"""Showing the lessons that apply, and counting that they fired."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from cudadent42.base.errors import UsageError
from cudadent42.model.text import clean
from cudadent42.patterns import firings
from cudadent42.patterns.evidence import PatternEvidence
from cudadent42.patterns.lessons import usable
from cudadent42.patterns.matching import Match, match

_MOST = 3
"""Lessons that are printed after an error, so that they do not bury it."""


def lines(matches: Sequence[Match]) -> list[str]:
    """The lessons as text: title, what was seen, what to do."""
    shown = []
    for item in matches:
        shown.append(f"lesson: {item.lesson.title} ({item.lesson.id})")
        shown += [f"    seen: {clean(reason)}" for reason in item.because]
        shown.append(f"    {' '.join(item.lesson.remedy.split())}")
    return shown


def print_matches(matches: Sequence[Match], file: TextIO | None = None, most: int = _MOST) -> None:
    """Print lessons, the first ``most`` in full and the rest by name; to standard error by default."""
    stream = sys.stderr if file is None else file
    for line in lines(matches[:most]):
        print(line, file=stream)
    if len(matches) > most:
        rest = ", ".join(item.lesson.id for item in matches[most:])
        print(f"also: {rest}; see `cudadent42 patterns show`", file=stream)


def after_failure(evidence: PatternEvidence) -> tuple[Match, ...]:
    """Match, print to standard error and count: what a failing stage does. An error is on its way, so a lesson of the
    user's own that is wrong, or a count that cannot be kept, is only noted."""
    lessons, troubles = usable()
    matches = match(evidence, lessons)
    print_matches(matches)
    for trouble in troubles:
        print(f"note: {trouble}", file=sys.stderr)
    if matches:
        try:
            firings.record(item.lesson.id for item in matches)
        except (UsageError, OSError) as error:
            print(f"note: the lessons are not counted: {error}", file=sys.stderr)
    return matches
