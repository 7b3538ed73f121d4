"""Which lessons apply. A pure function of the lessons and the evidence."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cudadent42.patterns.evidence import PatternEvidence
from cudadent42.patterns.expression import LINE_LIMIT, compile_bounded
from cudadent42.patterns.lessons import Clause, Lesson, Symptom, library

TIME_LIMIT_S = 5.0
"""After which no further line is looked at: the user is waiting for an error message."""

_SHOWN = 160
"""Characters of a line that are quoted."""


@dataclass(frozen=True)
class Match:
    """A lesson that applies, and why."""

    lesson: Lesson
    because: tuple[str, ...]
    """What was seen, one line for each clause that held."""


def match(evidence: PatternEvidence, lessons: Sequence[Lesson] | None = None) -> tuple[Match, ...]:
    """The lessons whose symptoms the evidence shows, in the order of ``lessons`` (None: the whole library)."""
    reader = _Reader(evidence)
    matches = []
    for lesson in library() if lessons is None else lessons:
        because = next(filter(None, (reader.symptom(symptom) for symptom in lesson.symptom)), None)
        if because:
            matches.append(Match(lesson, because))
    return tuple(matches)


class _Reader:
    def __init__(self, evidence: PatternEvidence) -> None:
        self._evidence = evidence
        self._lines = [
            (f"{log.source}:{number}", line[:LINE_LIMIT])
            for log in evidence.logs
            for number, line in log.lines()
        ]
        self._until_s = time.monotonic() + TIME_LIMIT_S

    def symptom(self, symptom: Symptom) -> tuple[str, ...] | None:
        """What was seen, or None where the symptom does not apply."""
        seen = [self.clause(clause) for clause in symptom.all]
        if not all(seen):
            return None
        one = next(filter(None, map(self.clause, symptom.any)), "")
        if symptom.any and not one:
            return None
        if any(map(self.clause, symptom.none)):
            return None
        return tuple(filter(None, (*seen, one)))

    def clause(self, clause: Clause) -> str:
        """What makes the clause hold, in words; empty where it does not."""
        if clause.log:
            return self._log(compile_bounded(clause.log))
        if clause.metric:
            value = self._evidence.metrics.get(clause.metric)
            return "" if value is None else _number(clause, value)
        if clause.resource:
            rows = (row[clause.resource] for row in self._evidence.resources if clause.resource in row)
            return next(filter(None, (_number(clause, value) for value in rows)), "")
        return self._fact(clause)

    def _log(self, pattern: re.Pattern[str]) -> str:
        for index, (where, line) in enumerate(self._lines):
            if pattern.search(line):
                return f"{where}: {_excerpt(line, pattern)}"
            if index % 64 == 0 and time.monotonic() > self._until_s:
                return ""
        return ""

    def _fact(self, clause: Clause) -> str:
        if clause.fact not in self._evidence.facts:
            return ""
        value = self._evidence.facts[clause.fact]
        if clause.missing:
            return "" if value else f"{clause.fact}: none"
        if clause.equals is not None:
            return (
                f"{clause.fact} = {value}"
                if value == clause.equals and type(value) is type(clause.equals)
                else ""
            )
        if clause.matches:
            held = isinstance(value, str) and compile_bounded(clause.matches).search(value[:LINE_LIMIT])
            return f"{clause.fact} = {value}" if held else ""
        return (
            _number(clause, value) if isinstance(value, (int, float)) and not isinstance(value, bool) else ""
        )


def _number(clause: Clause, value: float) -> str:
    if not clause.above < value < clause.below:
        return ""
    limits = [f"above {clause.above:g}"] if clause.above > float("-inf") else []
    limits += [f"below {clause.below:g}"] if clause.below < float("inf") else []
    return f"{clause.subject} = {value:.4g} ({', '.join(limits)})"


def _excerpt(line: str, pattern: re.Pattern[str]) -> str:
    """The line, or the part of a long one that the pattern found."""
    line = line.strip()
    if len(line) <= _SHOWN:
        return line
    occurrence = pattern.search(line)
    start = max(0, min(occurrence.start() if occurrence else 0, len(line) - _SHOWN))
    return ("…" if start else "") + line[start : start + _SHOWN] + ("…" if start + _SHOWN < len(line) else "")
