"""Reading suites: TOML files that say what to measure.

The built-in ones are package data; any other is given by path. Parsing is strict: an unknown key is an error
that names it, because a misspelt option that is ignored costs a whole run.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from cudadent42.errors import UsageError
from cudadent42.records import CacheState, TimerKind

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

E = TypeVar("E", bound=Enum)


class DType(str, Enum):
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


@dataclass(frozen=True)
class Shape:
    """One problem of a suite, before it is given a dtype."""

    name: str
    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool


@dataclass(frozen=True)
class Suite:
    name: str
    description: str
    dtypes: tuple[DType, ...]
    baseline: str
    implementations: tuple[str, ...]
    repeats: int
    warmup: int
    margin: float | None
    """None: what suits the device (`cudadent42.bench.margin`)."""
    timer: TimerKind
    cache: CacheState
    shapes: tuple[Shape, ...]


MAX_REPEATS = 100_000
MAX_WARMUP = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_SIZE = 1 << 20
_SUITE_KEYS = frozenset(
    (
        "name",
        "description",
        "dtypes",
        "baseline",
        "implementations",
        "repeats",
        "warmup",
        "margin",
        "timer",
        "l2",
        "case",
    )
)
_CASE_KEYS = frozenset(
    ("name", "batch", "num_heads", "num_kv_heads", "seqlen", "seqlen_q", "seqlen_k", "head_dim", "causal")
)


def builtin_suites() -> dict[str, str]:
    """Text of the suites that come with the package, by name."""
    folder = resources.files("cudadent42.suites")
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".toml")
    }


def load_suite(name_or_path: str) -> Suite:
    """The built-in suite of that name, or the file at that path (which has a slash or ends in ``.toml``)."""
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UsageError(f"cannot read the suite {path}: {reason}; expected a TOML file") from error
        return parse_suite(text, str(path))
    known = builtin_suites()
    if name_or_path not in known:
        raise UsageError(
            f"unknown suite {name_or_path!r}; known are {', '.join(known)}, or give the path of a TOML file"
            + did_you_mean(name_or_path, known)
        )
    return parse_suite(known[name_or_path], f"suite {name_or_path}")


def parse_suite(text: str, where: str) -> Suite:
    """A suite from its TOML text; ``where`` names it in errors."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is not valid TOML: {error}") from error
    table = _Table(document, where)
    table.check_keys(_SUITE_KEYS)
    cases = table.value("case", list, "a list of cases, each beginning with [[case]]")
    if not cases:
        raise UsageError(f"{where}: expected at least one [[case]]")
    suite = Suite(
        name=table.name("name"),
        description=table.value("description", str, "text", ""),
        dtypes=tuple(parse_dtype(item, where) for item in table.strings("dtypes", ["fp16", "bf16"])),
        baseline=table.value("baseline", str, "the name of an implementation", "pytorch"),
        implementations=tuple(table.strings("implementations", ["pytorch", "cudadent42"])),
        repeats=table.integer("repeats", 1, MAX_REPEATS, 25),
        warmup=table.integer("warmup", 0, MAX_WARMUP, 3),
        margin=table.fraction("margin"),
        timer=table.choice("timer", TimerKind.CALL),
        cache=table.choice("l2", CacheState.WARM),
        shapes=tuple(_parse_shape(item, f"{where}, case {i + 1}") for i, item in enumerate(cases)),
    )
    _check_unique([shape.name for shape in suite.shapes], "case", where)
    _check_unique([dtype.value for dtype in suite.dtypes], "dtype", where)
    _check_unique(list(suite.implementations), "implementation", where)
    return suite


def parse_dtype(text: str, where: str) -> DType:
    try:
        return DType(text)
    except ValueError:
        known = [dtype.value for dtype in DType]
        raise UsageError(
            f"{where}: unknown dtype {text!r}; known are {', '.join(known)}{did_you_mean(text, known)}"
        ) from None


def did_you_mean(word: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _parse_shape(item: object, where: str) -> Shape:
    if not isinstance(item, dict):
        raise UsageError(f"{where}: expected a table, found {item!r}")
    table = _Table(item, where)
    name = table.name("name")
    table = _Table(item, f"{where} ({name})")
    table.check_keys(_CASE_KEYS)
    if "seqlen" in item and ("seqlen_q" in item or "seqlen_k" in item):
        raise UsageError(f"{table.where}: give either seqlen or seqlen_q and seqlen_k, not both")
    both = table.integer("seqlen", 1, _MAX_SIZE, None) if "seqlen" in item else None
    num_heads = table.integer("num_heads", 1, _MAX_SIZE, None)
    num_kv_heads = table.integer("num_kv_heads", 1, _MAX_SIZE, num_heads)
    if num_heads % num_kv_heads:
        raise UsageError(
            f"{table.where}: num_heads = {num_heads} is not a multiple of num_kv_heads = {num_kv_heads}"
        )
    head_dim = table.integer("head_dim", 8, 512, None)
    if head_dim % 8:
        raise UsageError(f"{table.where}: head_dim = {head_dim}; expected a multiple of 8")
    return Shape(
        name=name,
        batch=table.integer("batch", 1, _MAX_SIZE, None),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        seqlen_q=table.integer("seqlen_q", 1, _MAX_SIZE, both),
        seqlen_k=table.integer("seqlen_k", 1, _MAX_SIZE, both),
        head_dim=head_dim,
        causal=table.value("causal", bool, "true or false", False),
    )


def _check_unique(names: list[str], kind: str, where: str) -> None:
    if not names:
        raise UsageError(f"{where}: expected at least one {kind}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{where}: the {kind} {twice!r} is given twice")


class _Table:
    """Typed access to one TOML table, with errors that say where and what."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def check_keys(self, known: Collection[str]) -> None:
        for key in self._values:
            if key not in known:
                near = did_you_mean(key, known)
                raise UsageError(
                    f"{self.where}: unknown key {key!r}; known are {', '.join(sorted(known))}{near}"
                )

    def value(self, key: str, kind: type, expected: str, default: Any = None) -> Any:
        """The value under ``key``, of type ``kind``; a default of None makes the key required."""
        found = self._values.get(key, default)
        if found is None:
            raise UsageError(f"{self.where}: the key {key!r} is missing; expected {expected}")
        if type(found) is not kind:
            raise UsageError(f"{self.where}: {key} = {found!r}; expected {expected}")
        return found

    def integer(self, key: str, low: int, high: int, default: int | None) -> int:
        expected = f"a whole number from {low} to {high}"
        found: int = self.value(key, int, expected, default)
        if not low <= found <= high:
            raise UsageError(f"{self.where}: {key} = {found}; expected {expected}")
        return found

    def fraction(self, key: str) -> float | None:
        if key not in self._values:
            return None
        found = self._values[key]
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < 1:
            raise UsageError(f"{self.where}: {key} = {found!r}; expected a number from 0 to below 1")
        return float(found)

    def choice(self, key: str, default: E) -> E:
        """One of the words of the enumeration that ``default`` belongs to."""
        kind = type(default)
        found = self._values.get(key, default.value)
        words = [member.value for member in kind]
        if found not in words:
            raise UsageError(f"{self.where}: {key} = {found!r}; expected {' or '.join(words)}")
        return kind(found)

    def name(self, key: str) -> str:
        expected = "a name of letters, digits, dots, dashes and underscores, 64 at most"
        found: str = self.value(key, str, expected)
        if not _NAME.fullmatch(found):
            raise UsageError(f"{self.where}: {key} = {found!r}; expected {expected}")
        return found

    def strings(self, key: str, default: list[str]) -> list[str]:
        found = self.value(key, list, "a list of names", default)
        if not all(isinstance(item, str) for item in found):
            raise UsageError(f"{self.where}: {key} = {found!r}; expected a list of names")
        return list(found)
