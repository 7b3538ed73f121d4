"""Regular expressions that cannot run away.

Python's engine backtracks, so that ``(a+)+b`` takes longer than the age of the universe on a line of 60 characters.
Lessons are matched while a user waits for an error message, against text that nobody has seen before. So a pattern is
admitted only if the number of ways in which it can be tried on one line, by its structure alone, is small. That
number is the product of what its repeats can choose from, times the places where a match can begin.
"""

from __future__ import annotations

import functools
import re
import warnings
from dataclasses import dataclass

LINE_LIMIT = 2000
"""Characters of a line that are looked at."""

WAYS_LIMIT = 20_000_000
"""Ways to try a pattern on one line: some tenths of a second at worst, on a line made for the purpose."""

_MOST_TURNS = 24
"""Repeats of a group with two ways or more: 2 to this power is more than ``WAYS_LIMIT`` allows on one line."""

LENGTH_LIMIT = 500
"""Characters of a pattern."""

_IGNORE_CASE = "(?i)"
_MARKS = {"*": (0, LINE_LIMIT), "+": (1, LINE_LIMIT), "?": (0, 1)}
_BOUNDS = re.compile(r"\{(\d{1,4})?(,)?(\d{1,4})?\}")


class ExpressionError(ValueError):
    """A pattern that is not a regular expression, or could take too long."""


@functools.cache
def compile_bounded(pattern: str) -> re.Pattern[str]:
    """The compiled pattern, looked at once in a process. Raises ExpressionError where it is wrong or not bounded.

    Allowed: literals, ``.``, classes, ``^ $ \\b``, groups, alternatives and repeats; ``(?i)`` in front. Not allowed:
    look-around, back references, flags elsewhere.
    """
    if not pattern:
        raise ExpressionError("the pattern is empty; expected a regular expression")
    if len(pattern) > LENGTH_LIMIT:
        raise ExpressionError(f"the pattern has {len(pattern)} characters; expected {LENGTH_LIMIT} at most")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about [[, which may mean something else one day
            compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ExpressionError(f"{pattern!r} is not a regular expression: {error}") from error
    ways = LINE_LIMIT * _Scanner(pattern.removeprefix(_IGNORE_CASE)).pattern()
    if ways > WAYS_LIMIT:
        raise ExpressionError(
            f"{pattern!r} could be tried in more than {WAYS_LIMIT:,} ways on one line; bound its repeats, "
            "such as .{0,60} for .*, and repeat no group that holds a repeat or alternatives"
        )
    return compiled


@dataclass
class _Scanner:
    """Counts the ways of a pattern that ``re`` has accepted, reading it from left to right."""

    text: str
    at: int = 0

    def pattern(self) -> int:
        ways = self._alternatives()
        if self.at < len(self.text):
            raise ExpressionError(f"{self.text!r}: unexpected {self.text[self.at]!r}")
        return ways

    def _alternatives(self) -> int:
        ways = self._sequence()
        while self._peek() == "|":
            self.at += 1
            ways += self._sequence()
        return ways

    def _sequence(self) -> int:
        ways = 1
        while self._peek() not in ("", "|", ")"):
            ways = min(ways * self._repeated(), WAYS_LIMIT + 1)
        return ways

    def _repeated(self) -> int:
        inside = self._atom()
        low, high = self._bounds()
        if self._peek() == "?" and high != low:
            self.at += 1  # lazy: as many ways
        if inside == 1:
            return high - low + 1
        if high > _MOST_TURNS:
            return WAYS_LIMIT + 1
        ways: int = sum(inside**count for count in range(low, high + 1))
        return min(ways, WAYS_LIMIT + 1)

    def _bounds(self) -> tuple[int, int]:
        """How often the atom may be repeated; once where nothing is said."""
        mark = self._peek()
        if mark in ("*", "+", "?"):
            self.at += 1
            return _MARKS[mark]
        match = _BOUNDS.match(self.text, self.at) if mark == "{" else None
        if match is None or match[0] == "{}" or match[0] == "{,}":
            return 1, 1
        self.at = match.end()
        low = int(match[1] or 0)
        if not match[2]:
            return low, low
        return low, min(int(match[3]), LINE_LIMIT) if match[3] else LINE_LIMIT

    def _atom(self) -> int:
        character = self._peek()
        self.at += 1
        if character == "\\":
            if self._peek().isdigit():
                raise ExpressionError(f"{self.text!r}: back references are not allowed")
            self.at += 1
        elif character == "[":
            self._class()
        elif character == "(":
            return self._group()
        return 1

    def _class(self) -> None:
        if self._peek() == "^":
            self.at += 1
        if self._peek() == "]":
            self.at += 1  # a bracket that comes first stands for itself
        while self._peek() != "]":
            self.at += 2 if self._peek() == "\\" else 1
        self.at += 1

    def _group(self) -> int:
        if self._peek() == "?":
            if not self.text.startswith("?:", self.at):
                raise ExpressionError(f"{self.text!r}: of the groups that begin with (? only (?: is allowed")
            self.at += 2
        ways = self._alternatives()
        self.at += 1
        return ways

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]
