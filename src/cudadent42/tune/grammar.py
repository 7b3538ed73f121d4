"""The expressions of a space: whole numbers, truth values and words, read by a parser of this module's own.

    expression = conjunction, { "or", conjunction }
    conjunction = negation, { "and", negation }
    negation = "not", negation | comparison
    comparison = sum, { ("<" | "<=" | ">" | ">=" | "==" | "!="), sum }      as in a <= b <= c
    sum = product, { ("+" | "-"), product }
    product = factor, { ("*" | "//" | "%"), factor }
    factor = "-", factor | number | name | 'word' | "yes" | "no" | "(", expression, ")"

Division rounds down. The kind of every part is decided when the text is read, so that a mistake is told before
anything runs.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cudadent42.base.errors import UsageError
from cudadent42.base.toml import did_you_mean

Value = int | bool | str

LONGEST = 500
"""Characters of an expression."""

DEEPEST = 40
"""Brackets and signs inside each other."""

_TOKEN = re.compile(r"\s*(?:(\d{1,10})(?![\w.])|([A-Za-z_][\w.]*)|'([^'\n]*)'|(<=|>=|==|!=|//|[-+*%<>()]))")
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
_TRUTH = {"yes": True, "no": False}
_RESERVED = ("and", "or", "not", *_TRUTH)


class Kind(Enum):
    """What an expression gives."""

    NUMBER = "a whole number"
    TRUTH = "a condition"
    WORD = "a word"


def kind_of(value: Value) -> Kind:
    if isinstance(value, bool):
        return Kind.TRUTH
    return Kind.NUMBER if isinstance(value, int) else Kind.WORD


Settings = Mapping[str, Value]
"""Values by the name of their parameter."""


@dataclass(frozen=True)
class Expression:
    """What was read, and how it is computed."""

    text: str
    where: str
    """It stands, for messages."""
    kind: Kind
    _compute: Callable[[Settings], Value]

    def value(self, settings: Settings) -> Value:
        """Of these settings. Raises UsageError where it divides by zero."""
        try:
            return self._compute(settings)
        except ZeroDivisionError:
            values = ", ".join(f"{name}={value}" for name, value in settings.items())
            raise UsageError(
                f"{self.where}: {self.text!r} divides by zero at {values}; guard the division"
            ) from None


def is_name(text: str) -> bool:
    """Whether an expression can name it."""
    return re.fullmatch(r"[A-Za-z_][\w.]*", text) is not None and text not in _RESERVED


def parse(text: str, kinds: Mapping[str, Kind], wanted: Kind, where: str) -> Expression:
    """An expression of these names that gives the wanted kind. Raises UsageError, saying where and what is wrong."""
    if len(text) > LONGEST:
        raise UsageError(f"{where}: the expression has {len(text)} characters; expected {LONGEST} at most")
    reader = _Reader(text, kinds, where)
    node = reader.whole()
    if node.kind is not wanted:
        raise reader.error(f"gives {node.kind.value}, not {wanted.value}")
    return Expression(text, where, node.kind, node.compute)


@dataclass(frozen=True)
class _Node:
    kind: Kind
    compute: Callable[[Settings], Any]


def _either(a: _Node, b: _Node) -> _Node:
    """The right side is computed only where the left does not decide, as in ``B == 0 or A % B == 0``."""
    return _Node(Kind.TRUTH, lambda s: a.compute(s) or b.compute(s))


def _both(a: _Node, b: _Node) -> _Node:
    return _Node(Kind.TRUTH, lambda s: a.compute(s) and b.compute(s))


def _combined(apply: Callable[[int, int], int], a: _Node, b: _Node) -> _Node:
    return _Node(Kind.NUMBER, lambda s: apply(a.compute(s), b.compute(s)))


class _Reader:
    """Recursive descent, one method for each rule of the grammar."""

    def __init__(self, text: str, kinds: Mapping[str, Kind], where: str) -> None:
        self._text = text
        self._kinds = kinds
        self._where = where
        self._tokens = self._split()
        self._at = 0
        self._depth = 0

    def error(self, problem: str) -> UsageError:
        return UsageError(f"{self._where}: {self._text!r} {problem}")

    def whole(self) -> _Node:
        node = self._expression()
        if self._at < len(self._tokens):
            raise self.error(f"does not end before {self._tokens[self._at]!r}")
        return node

    def _split(self) -> list[str]:
        tokens: list[str] = []
        at = 0
        rest = self._text.rstrip()
        while at < len(rest):
            match = _TOKEN.match(rest, at)
            if match is None:
                odd = rest[at:].lstrip()[:10]
                hint = "; division is //" if odd.startswith("/") else ""
                raise self.error(f"cannot be read from {odd!r} on{hint}")
            tokens.append(match[0].strip())
            at = match.end()
        return tokens

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        if not token:
            raise self.error("ends too early")
        self._at += 1
        return token

    def _expect(self, node: _Node, kind: Kind, beside: str) -> _Node:
        if node.kind is not kind:
            raise self.error(f"has {node.kind.value} beside {beside!r}, which takes {kind.value}")
        return node

    def _expression(self) -> _Node:
        node = self._conjunction()
        while self._peek() == "or":
            self._take()
            left = self._expect(node, Kind.TRUTH, "or")
            node = _either(left, self._expect(self._conjunction(), Kind.TRUTH, "or"))
        return node

    def _conjunction(self) -> _Node:
        node = self._negation()
        while self._peek() == "and":
            self._take()
            left = self._expect(node, Kind.TRUTH, "and")
            node = _both(left, self._expect(self._negation(), Kind.TRUTH, "and"))
        return node

    def _negation(self) -> _Node:
        if self._peek() != "not":
            return self._comparison()
        self._take()
        self._deeper()
        inner = self._expect(self._negation(), Kind.TRUTH, "not").compute
        self._depth -= 1
        return _Node(Kind.TRUTH, lambda s: not inner(s))

    def _comparison(self) -> _Node:
        left = self._sum()
        pairs: list[tuple[Callable[[Any, Any], bool], _Node, _Node]] = []
        while self._peek() in _COMPARISONS:
            sign = self._take()
            right = self._sum()
            if left.kind is not right.kind:
                raise self.error(f"compares {left.kind.value} with {right.kind.value}")
            if left.kind is not Kind.NUMBER and sign not in ("==", "!="):
                raise self.error(f"orders {left.kind.value} by {sign!r}, which takes a whole number")
            pairs.append((_COMPARISONS[sign], left, right))
            left = right
        if not pairs:
            return left
        return _Node(Kind.TRUTH, lambda s: all(holds(a.compute(s), b.compute(s)) for holds, a, b in pairs))

    def _sum(self) -> _Node:
        return self._chain(("+", "-"), self._product)

    def _product(self) -> _Node:
        return self._chain(("*", "//", "%"), self._factor)

    def _chain(self, signs: tuple[str, ...], part: Callable[[], _Node]) -> _Node:
        node = part()
        while self._peek() in signs:
            sign = self._take()
            left = self._expect(node, Kind.NUMBER, sign)
            node = _combined(_ARITHMETIC[sign], left, self._expect(part(), Kind.NUMBER, sign))
        return node

    def _factor(self) -> _Node:
        self._deeper()
        node = self._atom(self._take())
        self._depth -= 1
        return node

    def _atom(self, token: str) -> _Node:
        if token == "-":
            inner = self._expect(self._factor(), Kind.NUMBER, "-").compute
            return _Node(Kind.NUMBER, lambda s: -inner(s))
        if token == "(":
            node = self._expression()
            if self._take() != ")":
                raise self.error("has a bracket that is not closed")
            return node
        if token.isdecimal():
            return self._constant(int(token))
        if token.startswith("'"):
            return self._constant(token[1:-1])
        if token in _TRUTH:
            return self._constant(_TRUTH[token])
        if token in self._kinds:
            return _Node(self._kinds[token], lambda s: s[token])
        if is_name(token):
            raise self.error(
                f"names {token!r}{did_you_mean(token, self._kinds)}; expected one of {', '.join(self._kinds)}"
            )
        raise self.error(f"has {token!r} where a value was expected")

    @staticmethod
    def _constant(value: Value) -> _Node:
        return _Node(kind_of(value), lambda _: value)

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise self.error(f"is nested more than {DEEPEST} deep")
