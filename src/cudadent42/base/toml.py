"""Typed access to a TOML table, with errors that say where and what."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from cudadent42.base.errors import UsageError
from cudadent42.base.reading import check_values

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

E = TypeVar("E", bound=Enum)

MAX_SIZE = 1 << 20
"""Of any number in a case."""

_ALIKE = 0.7
"""Of two words, to be one mistyped: at 0.6, difflib's own choice, `nope` is taken for `hopper`."""
_LONGEST_TYPO = 100

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """A TOML document; ``where`` names it in errors. Raises UsageError where it is none.

    The reader says ValueError of whatever is no TOML or a number of thousands of digits, and runs out of stack on
    thousands of brackets.
    """
    try:
        document: dict[str, Any] = tomllib.loads(text)
        check_values(document, integers=False)
    except (ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{where} is not valid TOML: {error}") from error
    return document


class Table:
    """Typed access to one TOML table, with errors that say where and what."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def has(self, key: str) -> bool:
        return key in self._values

    def check_keys(self, allowed: Collection[str]) -> None:
        for key in self._values:
            if key not in allowed:
                near = did_you_mean(key, allowed)
                raise UsageError(
                    f"{self.where}: unknown key {key!r}; expected one of {', '.join(sorted(allowed))}{near}"
                )

    def value(self, key: str, kind: type, expected: str, default: Any = None) -> Any:
        """The value under ``key``, of type ``kind``; a default of None makes the key required."""
        value = self._values.get(key, default)
        if value is None:
            raise UsageError(f"{self.where}: the key {key!r} is missing; expected {expected}")
        if type(value) is not kind:
            raise UsageError(f"{self.where}: {key} = {value!r}; expected {expected}")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None) -> int:
        expected = f"a whole number from {low} to {high}"
        value: int = self.value(key, int, expected, default)
        if not low <= value <= high:
            raise UsageError(f"{self.where}: {key} = {value}; expected {expected}")
        return value

    def fraction(self, key: str) -> float | None:
        if key not in self._values:
            return None
        value = self._values[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise UsageError(f"{self.where}: {key} = {value!r}; expected a number from 0 to below 1")
        return float(value)

    def number(self, key: str, high: float, expected: str, default: float | None) -> float:
        """A number from 0 to ``high``; a default of None makes the key required."""
        value = self._values.get(key, default)
        if value is None:
            raise UsageError(f"{self.where}: the key {key!r} is missing; expected {expected}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= high:
            raise UsageError(f"{self.where}: {key} = {value!r}; expected {expected}")
        return float(value)

    def choice(self, key: str, default: E) -> E:
        """One of the words of the enumeration that ``default`` belongs to."""
        kind = type(default)
        return kind(self.word(key, [member.value for member in kind], default.value))

    def word(self, key: str, words: Sequence[str], default: str) -> str:
        """One of these words."""
        value = self._values.get(key, default)
        if value not in words:
            raise UsageError(f"{self.where}: {key} = {value!r}; expected {' or '.join(words)}")
        return str(value)

    def name(self, key: str) -> str:
        expected = "a name of letters, digits, dots, dashes and underscores, 64 at most"
        value: str = self.value(key, str, expected)
        if not _NAME.fullmatch(value):
            raise UsageError(f"{self.where}: {key} = {value!r}; expected {expected}")
        return value

    def strings(self, key: str, default: list[str]) -> list[str]:
        values = self.value(key, list, "a list of names", default)
        if not all(isinstance(item, str) for item in values):
            raise UsageError(f"{self.where}: {key} = {values!r}; expected a list of names")
        return list(values)


_SHORTEST_STEM = 4
"""Letters from which on the beginning of a name is taken for it."""


def did_you_mean(word: str, candidates: Collection[str]) -> str:
    near = difflib.get_close_matches(word[:_LONGEST_TYPO], candidates, n=1, cutoff=_ALIKE)
    if not near and len(word) >= _SHORTEST_STEM:
        near = sorted(name for name in candidates if name.startswith(word))[:1]
    return f" (did you mean {near[0]!r}?)" if near else ""
