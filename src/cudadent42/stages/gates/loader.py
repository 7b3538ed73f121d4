"""Reading gate files: TOML, nothing of which is evaluated.

Parsing is strict, as with suites: a misspelt key that is ignored is a gate that guards nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from cudadent42.base.errors import UsageError
from cudadent42.base.reading import read_text
from cudadent42.base.toml import Table, did_you_mean, parse_toml
from cudadent42.decisions.gates import SCHEMA_VERSION, Gate, GateFile, OnFailure, Relation, Scope

_FILE_KEYS = frozenset(("schema_version", "description", "gate"))
_RELATION_KEYS = tuple(relation.value for relation in Relation)
_GATE_KEYS = frozenset(("name", "metric", "of", "cases", "on_failure", *_RELATION_KEYS))
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(%|x|×)?\s*")
_MOST = 1e12
"""Of a threshold: one beyond it, or an infinite one, would guard nothing."""
_SHOWN = 60
_EXPECTED_NUMBER = 'a number, or text such as "3 %" or "1.5x"'


def builtin_gates() -> dict[str, str]:
    """Text of the gate files that come with the package, by name."""
    folder = resources.files("cudadent42.stages.gates") / "files"
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".toml")
    }


def load(name_or_path: Path | str) -> GateFile:
    """The built-in gates of that name, or the file at that path. Raises UsageError where it is not understood."""
    text = str(name_or_path)
    if "/" in text or text.endswith(".toml"):
        path = Path(name_or_path)
        try:
            return parse(read_text(path), str(path))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UsageError(f"cannot read the gates {path}: {reason}; expected a TOML file") from error
    builtin = builtin_gates()
    if text not in builtin:
        raise UsageError(
            f"unknown gates {text!r}; expected one of {', '.join(builtin)}, or the path of a TOML file"
            + did_you_mean(text, builtin)
        )
    return parse(builtin[text], text)


def parse(text: str, where: str) -> GateFile:
    """Gates from TOML text; ``where`` names it in errors."""
    document = parse_toml(text, where)
    table = Table(document, where)
    version = table.integer("schema_version", 1, 1 << 20, SCHEMA_VERSION)
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{where} is of schema_version {version}; this cudadent42 reads up to {SCHEMA_VERSION}: upgrade it"
        )
    table.check_keys(_FILE_KEYS)
    items = table.value("gate", list, "a list of gates, each beginning with [[gate]]")
    if not items:
        raise UsageError(f"{where}: expected at least one [[gate]]")
    gates = tuple(_parse_gate(item, f"{where}, gate {i + 1}") for i, item in enumerate(items))
    names = [gate.name for gate in gates]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{where}: the gate {twice!r} is given twice")
    return GateFile(Path(where).name, gates, table.value("description", str, "text", ""))


def _parse_gate(item: object, where: str) -> Gate:
    if not isinstance(item, dict):
        raise UsageError(f"{where}: expected a table, found {item!r}")
    table = Table(item, where)
    name = table.value("name", str, "text")
    where = f"{where} ({name})"
    table = Table(item, where)
    table.check_keys(_GATE_KEYS)
    given = [key for key in _RELATION_KEYS if key in item]
    if len(given) != 1:
        raise UsageError(
            f"{where}: expected exactly one of {', '.join(_RELATION_KEYS)}, found {', '.join(given) or 'none'}"
        )
    relation = Relation(given[0])
    if ("of" in item) != (relation is Relation.WITHIN):
        raise UsageError(f'{where}: `within` and `of` go together: within = "10 %" and of = 0.10')
    wanted = (
        _word(item, relation, where)
        if relation in (Relation.IS, Relation.IS_NOT)
        else _number(item, relation.value, where)
    )
    if relation is Relation.WITHIN and isinstance(wanted, float) and wanted < 0:
        raise UsageError(f'{where}: within = {item["within"]!r}; expected a share from 0 on, such as "10 %"')
    scope, cases = _scope(item, where)
    return Gate(
        name=name,
        metric=table.value("metric", str, "the name of a metric"),
        relation=relation,
        wanted=wanted,
        of=_number(item, "of", where) if "of" in item else float("nan"),
        scope=scope,
        cases=cases,
        on_failure=table.choice("on_failure", OnFailure.FAIL),
    )


def _scope(item: Mapping[str, Any], where: str) -> tuple[Scope, tuple[str, ...]]:
    value = item.get("cases", Scope.OVERALL.value)
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return Scope.EVERY, tuple(value)
    try:
        return Scope(value), ()
    except ValueError:
        raise UsageError(
            f'{where}: cases = {value!r}; expected "overall", "every" or a list of names'
        ) from None


def _word(item: Mapping[str, Any], relation: Relation, where: str) -> str:
    value = item[relation.value]
    if not isinstance(value, str):
        raise UsageError(f'{where}: {relation.value} = {value!r}; expected a word, such as "passed"')
    return value


def _number(item: Mapping[str, Any], key: str, where: str) -> float:
    value = item[key]
    number = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _MOST:
        number = float(value)
    elif isinstance(value, str) and (matched := _NUMBER.fullmatch(value)):
        number = float(matched[1]) / (100.0 if matched[2] == "%" else 1.0)
    if not abs(number) <= _MOST:
        raise UsageError(f"{where}: {key} = {str(value)[:_SHOWN]!r}; expected {_EXPECTED_NUMBER}")
    return number
