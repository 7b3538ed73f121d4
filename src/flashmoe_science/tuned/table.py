"""A table of tuned configurations: TOML, data only.

schema_version = 1

[[entry]]
kernel = "attention.portable"       # the operation and its kernel, or file:NAME for a kernel in a file of its own
digest = "6f0c..."                  # SHA-256 of what it is compiled from
device = "NVIDIA H200"
multiprocessors = 132
settings = { block_n = 48 }         # fields of the configuration that differ from the usual choice
same = { dtype = "bf16", causal = true }            # what a problem must be
between = { seqlen_q = [1024, 4096] }               # closed ranges in which it must lie
ratio = 1.054                       # over the usual choice, with its 95 % interval
interval = [1.041, 1.067]
evidence = ["2026-11-22-portable"]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA_VERSION = 1

Value = int | bool | str

_MOST_NUMBER = 1 << 63
"""Whole numbers of TOML are below."""

_TEXTS = ("kernel", "digest", "device")
_KEYS = frozenset(
    (*_TEXTS, "multiprocessors", "settings", "same", "between", "ratio", "interval", "evidence", "file")
)


_MOST_LETTERS = 300
"""Of what a message repeats of a table. A table may have megabytes in the place of a word."""


def shortened(text: str) -> str:
    """As much of it as a message repeats."""
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]} ..."


class TableError(ValueError):
    """A table that cannot be read; the message says where and why."""


@dataclass(frozen=True)
class Region:
    """Problems that an entry is for. Every field that it names must fit; outside, the usual choice is taken."""

    same: Mapping[str, Value]
    between: Mapping[str, tuple[int, int]]

    def holds(self, problem: Mapping[str, Value]) -> bool:
        """Whether a problem, field by field, lies in it. A field that the problem lacks does not fit."""
        return all(problem.get(name) == value for name, value in self.same.items()) and all(
            low <= _number(problem.get(name)) <= high for name, (low, high) in self.between.items()
        )


def _number(value: Value | None) -> float:
    return value if isinstance(value, int) else float("nan")


@dataclass(frozen=True)
class TableEntry:
    """One configuration of one kernel on one kind of device."""

    kernel: str
    digest: str
    device: str
    multiprocessors: int
    region: Region
    settings: Mapping[str, Value]
    ratio: float
    low: float
    high: float
    evidence: tuple[str, ...] = ()
    file: str = ""
    """Of a kernel in a file of its own: the file with these settings, beside the table."""


def parse_table(text: str, where: str) -> tuple[TableEntry, ...]:
    """The entries of a table. Raises TableError."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise TableError(f"{where} is not valid TOML: {shortened(str(error))}") from error
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise TableError(
            f"{where} has schema_version {shortened(repr(version))}; this version reads {SCHEMA_VERSION}"
        )
    items = document.get("entry", [])
    if not isinstance(items, list):
        raise TableError(f"{where}: expected entries, each beginning with [[entry]]")
    return tuple(_entry(item, f"{where}, entry {number}") for number, item in enumerate(items, 1))


def _entry(item: Any, where: str) -> TableEntry:
    if not isinstance(item, dict) or set(item) - _KEYS:
        raise TableError(f"{where}: expected some of {', '.join(sorted(_KEYS))}")
    texts = {name: item.get(name) for name in _TEXTS}
    for name, text in texts.items():
        if not isinstance(text, str) or not text:
            raise TableError(f"{where}: {name} = {shortened(repr(text))}; expected text")
    interval = item.get("interval")
    if not (isinstance(interval, list) and len(interval) == 2 and all(map(_is_number, interval))):
        raise TableError(f"{where}: interval = {shortened(repr(interval))}; expected two numbers")
    if not _is_number(item.get("ratio")) or not 1.0 < interval[0] <= interval[1]:
        raise TableError(f"{where}: expected a ratio, and an interval above 1")
    evidence = item.get("evidence", [])
    if not (isinstance(evidence, list) and all(isinstance(each, str) for each in evidence)):
        raise TableError(f"{where}: evidence = {shortened(repr(evidence))}; expected a list of run folders")
    multiprocessors, file = item.get("multiprocessors", 0), item.get("file", "")
    if type(multiprocessors) is not int or not isinstance(file, str) or "/" in file or "\\" in file:
        raise TableError(
            f"{where}: expected multiprocessors as a whole number, and file as a name beside the table"
        )
    return TableEntry(
        kernel=str(texts["kernel"]),
        digest=str(texts["digest"]),
        device=str(texts["device"]),
        multiprocessors=multiprocessors,
        region=Region(_values(item, "same", where), _ranges(item, where)),
        settings=_values(item, "settings", where),
        ratio=float(item["ratio"]),
        low=float(interval[0]),
        high=float(interval[1]),
        evidence=tuple(evidence),
        file=file,
    )


def _is_number(value: Any) -> bool:
    return (
        type(value) in (int, float) and abs(value) < _MOST_NUMBER
    )  # more digits than a float holds, or infinity


def _values(item: Mapping[str, Any], key: str, where: str) -> Mapping[str, Value]:
    values = item.get(key, {})
    if not isinstance(values, dict) or not all(type(value) in (int, bool, str) for value in values.values()):
        raise TableError(
            f"{where}: {key} = {shortened(repr(values))}; expected names and whole numbers, words, true or false"
        )
    return values


def _ranges(item: Mapping[str, Any], where: str) -> Mapping[str, tuple[int, int]]:
    ranges = item.get("between", {})
    if not isinstance(ranges, dict):
        raise TableError(f"{where}: between = {shortened(repr(ranges))}; expected a table of ranges")
    for name, ends in ranges.items():
        two = isinstance(ends, list) and len(ends) == 2 and all(type(end) is int for end in ends)
        if not two or ends[0] > ends[1]:
            raise TableError(
                f"{where}: between {shortened(repr(name))} = {shortened(repr(ends))}; expected [low, high]"
            )
    return {name: (ends[0], ends[1]) for name, ends in ranges.items()}
