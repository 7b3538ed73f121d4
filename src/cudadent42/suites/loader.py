"""Reading suites: TOML files that say what to measure.

The built-in ones are package data; any other is given by path. Parsing is strict: an unknown key is an error
that names it, because a misspelt option that is ignored costs a whole run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Any

from cudadent42.base.errors import UsageError
from cudadent42.base.reading import read_text
from cudadent42.base.toml import Table, did_you_mean, parse_toml
from cudadent42.model.cases import DEFAULT_OPERATION, Case
from cudadent42.model.records import CacheState, TimerKind
from cudadent42.model.script import Script
from cudadent42.operations import definition, names
from cudadent42.operations.interface import Definition
from cudadent42.suites.script import CALL_KEYS, script_of


class DType(str, Enum):
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


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
    """None: what suits the device (`cudadent42.decisions.margin`)."""
    timer: TimerKind
    cache: CacheState
    shapes: tuple[Case, ...]
    """Each case once, in the first of the dtypes."""
    cpu_suite: str | None
    """The suite that a run on CPU takes instead, where this one is too large for it."""
    own_dtypes: Mapping[str, str] = field(default_factory=dict)
    """Of cases that are in one dtype only, by ``Case.name``."""
    script: Script | None = None
    """That the cases were recorded from."""

    @property
    def operation(self) -> str:
        return self.shapes[0].operation


MAX_REPEATS = 100_000
MAX_WARMUP = 10_000
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
        "operation",
        "cpu_suite",
        "case",
        "script",
    )
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
            text = read_text(path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UsageError(f"cannot read the suite {path}: {reason}; expected a TOML file") from error
        return parse_suite(text, str(path))
    builtin = builtin_suites()
    if name_or_path not in builtin:
        raise UsageError(
            f"unknown suite {name_or_path!r}; expected one of {', '.join(builtin)}, or the path of a TOML file"
            + did_you_mean(name_or_path, builtin)
        )
    return parse_suite(builtin[name_or_path], f"suite {name_or_path}")


def parse_suite(text: str, where: str) -> Suite:
    """A suite from its TOML text; ``where`` names it in errors."""
    document = parse_toml(text, where)
    table = Table(document, where)
    table.check_keys(_SUITE_KEYS)
    chosen = definition(table.word("operation", names(), DEFAULT_OPERATION))
    dtypes = tuple(parse_dtype(item, where) for item in table.strings("dtypes", ["fp16", "bf16"]))
    _check_unique([dtype.value for dtype in dtypes], "dtype", where)
    cases = table.value("case", list, "a list of cases, each beginning with [[case]]")
    if not cases:
        raise UsageError(f"{where}: expected at least one [[case]]")
    suite = Suite(
        name=table.name("name"),
        description=table.value("description", str, "text", ""),
        dtypes=dtypes,
        baseline=table.value("baseline", str, "the name of an implementation", chosen.baseline),
        implementations=tuple(table.strings("implementations", [chosen.baseline, "cudadent42"])),
        repeats=table.integer("repeats", 1, MAX_REPEATS, 25),
        warmup=table.integer("warmup", 0, MAX_WARMUP, 3),
        margin=table.fraction("margin"),
        timer=table.choice("timer", TimerKind.CALL),
        cache=table.choice("l2", CacheState.WARM),
        shapes=tuple(
            _parse_shape(item, f"{where}, case {i + 1}", chosen, dtypes[0]) for i, item in enumerate(cases)
        ),
        cpu_suite=table.name("cpu_suite") if table.has("cpu_suite") else None,
        own_dtypes=_own_dtypes(cases, where, dtypes),
        script=script_of(table, cases, dtypes[0].value) if table.has("script") else None,
    )
    _check_unique([shape.name for shape in suite.shapes], "case", where)
    _check_unique(list(suite.implementations), "implementation", where)
    return suite


def parse_dtype(text: str, where: str) -> DType:
    try:
        return DType(text)
    except ValueError:
        names = [dtype.value for dtype in DType]
        raise UsageError(
            f"{where}: unknown dtype {text!r}; expected one of {', '.join(names)}{did_you_mean(text, names)}"
        ) from None


def _parse_shape(item: object, where: str, chosen: Definition[Any, Any], dtype: DType) -> Case:
    if not isinstance(item, dict):
        raise UsageError(f"{where}: expected a table, found {item!r}")
    name = Table(item, where).name("name")
    table = Table(item, f"{where} ({name})")
    table.check_keys({"name", "dtype", *CALL_KEYS, *chosen.case_keys})
    case: Case = chosen.parse_case(
        table, name, table.word("dtype", [each.value for each in DType], dtype.value)
    )
    return case


def _own_dtypes(cases: Sequence[Any], where: str, dtypes: Sequence[DType]) -> dict[str, str]:
    own = {case["name"]: case["dtype"] for case in cases if isinstance(case, dict) and "dtype" in case}
    listed = [dtype.value for dtype in dtypes]
    for name, dtype in own.items():
        if dtype not in listed:
            raise UsageError(f"{where}: the case {name} is in {dtype}, which dtypes = {listed} does not list")
    return own


def _check_unique(names: list[str], kind: str, where: str) -> None:
    if not names:
        raise UsageError(f"{where}: expected at least one {kind}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{where}: the {kind} {twice!r} is given twice")
