"""The rules: read from ``data/rules.toml`` and ``data/cpu_rules.toml``, checked when they are read."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from cudadent42.base.errors import UsageError
from cudadent42.base.toml import parse_toml
from cudadent42.profiles.formulas import FORMULAS, evaluate
from cudadent42.profiles.quantities import Quantities
from cudadent42.profiles.records import Kind

_CONDITION = re.compile(r"([a-z][a-z0-9_]*) (<|<=|>|>=|==) (-?\d+(?:\.\d+)?)")
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}
PLACEHOLDER = re.compile(r"\{([a-z][a-z0-9_]*)(?::([^}]*))?\}")
_FIELDS = {"id", "kind", "title", "when", "evidence", "meaning", "experiment", "gain"}
_OPTIONAL = {"unless", "capped"}


@dataclass(frozen=True)
class Condition:
    """``name < number`` and the like."""

    name: str
    sign: str
    number: float

    def holds(self, value: float) -> bool:
        return _OPERATORS[self.sign](value, self.number)


@dataclass(frozen=True)
class Gain:
    formula: str
    operands: tuple[str | float, ...]

    def names(self) -> tuple[str, ...]:
        return tuple(operand for operand in self.operands if isinstance(operand, str))

    def share(self, available: Quantities) -> float:
        """Of the time, 0 to 1."""
        return evaluate(
            self.formula, [available[o].value if isinstance(o, str) else o for o in self.operands]
        )


@dataclass(frozen=True)
class Rule:
    id: str
    kind: Kind
    title: str
    when: tuple[Condition, ...]
    unless: tuple[Condition, ...]
    """It is silent where one of these is known and holds."""
    evidence: str
    """With ``{name:format}`` for quantities."""
    meaning: str
    experiment: str
    gain: Gain
    capped: bool
    """The gain is bounded by what the busiest unit leaves, ``headroom``."""

    def names(self) -> tuple[str, ...]:
        """Quantities without which it cannot be asked."""
        capped = ("headroom",) if self.capped else ()
        return (*dict.fromkeys((*(c.name for c in self.when), *self.gain.names(), *capped)),)


_FILES = ("rules.toml", "cpu_rules.toml")


@functools.cache
def builtin_rules() -> tuple[Rule, ...]:
    """The built-in rules."""
    folder = resources.files("cudadent42.profiles").joinpath("data")
    return tuple(
        rule for name in _FILES for rule in parse(folder.joinpath(name).read_text(encoding="utf-8"), name)
    )


def parse(text: str, where: str) -> tuple[Rule, ...]:
    """Rules of a TOML text. Raises UsageError, naming the rule, for one that cannot be understood."""
    document = parse_toml(text, f"{where}: the file")
    rules = tuple(_rule(entry, where) for entry in document.get("rule", ()))
    ids = [rule.id for rule in rules]
    double = next((name for name in ids if ids.count(name) > 1), None)
    if double is not None:
        raise UsageError(f"{where}: two rules are called {double!r}")
    return rules


def _rule(entry: Mapping[str, Any], where: str) -> Rule:
    name = entry.get("id", "?")
    missing = sorted(_FIELDS - set(entry))
    unknown = sorted(set(entry) - _FIELDS - _OPTIONAL)
    if missing or unknown:
        wrong = f"{missing[0]!r} is missing" if missing else f"{unknown[0]!r} is not a field of a rule"
        raise UsageError(f"{where}: rule {name!r}: {wrong}")
    try:
        kind = Kind(entry["kind"])
    except ValueError as error:
        raise UsageError(f"{where}: rule {name!r}: kind {entry['kind']!r}; expected {[*Kind]}") from error
    return Rule(
        id=name,
        kind=kind,
        title=entry["title"],
        when=tuple(_condition(text, name, where) for text in entry["when"]),
        unless=tuple(_condition(text, name, where) for text in entry.get("unless", ())),
        evidence=entry["evidence"],
        meaning=entry["meaning"],
        experiment=entry["experiment"],
        gain=_gain(entry["gain"], name, where),
        capped=bool(entry.get("capped", False)),
    )


def _condition(text: str, rule: str, where: str) -> Condition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UsageError(f"{where}: rule {rule!r}: {text!r} is no condition; expected 'name > 0.5'")
    return Condition(match[1], match[2], float(match[3]))


def _gain(entry: Mapping[str, Any], rule: str, where: str) -> Gain:
    formula, operands = str(entry.get("formula")), tuple(entry.get("of", ()))
    if formula not in FORMULAS:
        raise UsageError(
            f"{where}: rule {rule!r}: formula {formula!r}; expected one of {', '.join(FORMULAS)}"
        )
    wanted = FORMULAS[formula][0]
    if len(operands) != wanted:
        raise UsageError(f"{where}: rule {rule!r}: {formula} takes {wanted} operands, not {len(operands)}")
    return Gain(formula, operands)
