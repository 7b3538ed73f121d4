"""Records to JSON and back, for frozen dataclasses of plain values.

Floats that JSON has no word for (NaN, infinities) are written as the strings ``"nan"``, ``"inf"`` and
``"-inf"``, so the files stay strict JSON that any reader accepts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from cudadent42.base.reading import in_range, parse_json

T = TypeVar("T")

_FLOAT_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


TAGGED = "tagged"
"""Under which a field's metadata have its `Tagged`."""


@dataclasses.dataclass(frozen=True)
class Tagged:
    """A union of records whose members are told by a name that is written with each: for fields with this ``metadata``,
    which hold one such record or a tuple of them."""

    key: str
    """Under which the name is written: a class variable of each member, and a field of none."""
    type_of: Callable[[str], type[Any]]
    untagged: Callable[[Collection[str]], str]
    """The name, from the fields, for records that were written without one."""
    names: Callable[[], Collection[str]]
    """Of the members that are always there; more may come with other packages."""

    @property
    def metadata(self) -> Mapping[str, Tagged]:
        """For ``dataclasses.field``."""
        return {TAGGED: self}

    def encode(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return [self.encode(item) for item in value]
        return {self.key: getattr(value, self.key), **encode(value)}

    def shallow(self, value: Any) -> Any:
        """``encode`` as far as json needs it."""
        if isinstance(value, tuple):
            return [self.shallow(item) for item in value]
        return {self.key: getattr(value, self.key), **_shallow(value)}

    def decode(self, data: Any, where: str) -> Any:
        if isinstance(data, list):
            return tuple(self.decode(item, f"{where}[{i}]") for i, item in enumerate(data))
        if not isinstance(data, dict):
            raise ValueError(f"{where}: expected an object, found {type(data).__name__}")
        fields = {name: item for name, item in data.items() if name != self.key}
        name = data[self.key] if self.key in data else self.untagged(fields)
        if not isinstance(name, str):
            raise ValueError(f"{where}.{self.key}: expected text, found {name!r}")
        return _decode(self.type_of(name), fields, where)


def encode(value: object) -> Any:
    """The JSON-ready form of a record, a container of records or a plain value."""
    kind: Any = type(value)
    if kind is float:  # most of what a journal holds, so first
        return value if math.isfinite(value) else str(value)  # type: ignore[arg-type]
    if kind is str or kind is int:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            name: encode(getattr(value, name)) if tagged is None else tagged.encode(getattr(value, name))
            for name, tagged in _fields(kind)
        }
    if isinstance(value, Enum):
        return encode(value.value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        # Rows of figures are most of a journal: no call for each.
        return [item if type(item) is float and math.isfinite(item) else encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def decode(kind: type[T], data: Any) -> T:
    """The record of type ``kind`` that ``encode`` turned into ``data``. Unknown keys are an error."""
    return typing.cast("T", _decode(kind, data, kind.__name__))


def dumps(value: object, indent: int | None = 2) -> str:
    if indent is None:
        return line_of(value)
    return json.dumps(encode(value), indent=indent, allow_nan=False, ensure_ascii=False)


def line_of(value: object) -> str:
    """``dumps`` without a line feed: json walks the figures itself, several times as fast."""
    try:
        return _LINE.encode(value)
    except ValueError:  # an infinity or NaN, for which there are words of our own
        return json.dumps(encode(value), allow_nan=False, ensure_ascii=False)


def _shallow(value: object) -> Any:
    """What json does not know, as far as it does."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            name: getattr(value, name) if tagged is None else tagged.shallow(getattr(value, name))
            for name, tagged in _fields(type(value))
        }
    return encode(value)


_LINE = json.JSONEncoder(default=_shallow, allow_nan=False, ensure_ascii=False)


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, Tagged | None], ...]:
    return tuple((field.name, field.metadata.get(TAGGED)) for field in dataclasses.fields(kind))


def loads(kind: type[T], text: str) -> T:
    return decode(kind, parse_json(text))


@functools.cache
def _form(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """What a type is made of. A file has the same few types thousands of times."""
    return typing.get_origin(kind), typing.get_args(kind)


def _decode(kind: Any, data: Any, where: str) -> Any:
    if type(data) is kind:  # most of a file: plain values of just their type
        if kind is float:
            return _float(data, where)
        if kind is str or kind is int or kind is bool:
            return data
    origin, arguments = _form(kind)
    if kind is Any:
        return data
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, data, where)
    if dataclasses.is_dataclass(kind):
        return _decode_record(kind, data, where)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_decode_items(arguments[0], data, where))
    if origin is list:
        return _decode_items(arguments[0], data, where)
    if origin is dict:
        if not isinstance(data, dict):
            raise ValueError(f"{where}: expected an object, found {type(data).__name__}")
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _member(kind, data, where)
    if kind is Path and isinstance(data, str):
        return Path(data)
    if kind is float and not isinstance(data, bool):
        if isinstance(data, (int, float)):
            return _float(data, where)
        if isinstance(data, str) and data in _FLOAT_WORDS:
            return _FLOAT_WORDS[data]
    if kind is type(None) and data is None:
        return None
    raise ValueError(f"{where}: expected {kind}, found {reprlib.repr(data)}")


def _float(data: float, where: str) -> float:
    try:
        return in_range(float(data))
    except (OverflowError, ValueError) as error:
        raise ValueError(f"{where}: the number is out of range") from error


def _member(kind: Any, data: Any, where: str) -> Any:
    try:
        return kind(data)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{where}: {reprlib.repr(data)} is none of {', '.join(str(m.value) for m in kind)}"
        ) from error


def _decode_union(members: tuple[Any, ...], data: Any, where: str) -> Any:
    # Exact types first, so that 1 stays an int in `int | float`, and True a bool.
    for member in sorted(members, key=lambda member: type(data) is not member):
        try:
            return _decode(member, data, where)
        except ValueError:
            continue
    raise ValueError(f"{where}: {reprlib.repr(data)} fits none of {members}")


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Of a record's type: what to make of its fields."""

    kinds: Mapping[str, Any]
    """By name; evaluating annotations takes longer than all the rest."""
    required: tuple[str, ...]
    unions: Mapping[str, Tagged]


@functools.cache
def _layout(kind: Any) -> _Layout:
    fields = dataclasses.fields(kind)
    hints = typing.get_type_hints(kind)
    return _Layout(
        kinds={f.name: hints[f.name] for f in fields},
        required=tuple(
            f.name
            for f in fields
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ),
        unions={f.name: f.metadata[TAGGED] for f in fields if TAGGED in f.metadata},
    )


def _decode_record(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, found {type(data).__name__}")
    layout = _layout(kind)
    unknown = sorted(data.keys() - layout.kinds.keys())
    if unknown:
        names = ", ".join(sorted(layout.kinds))
        raise ValueError(f"{where}: unknown field {unknown[0]!r}; expected one of {names}")
    missing = [name for name in layout.required if name not in data]
    if missing:
        raise ValueError(f"{where}: field {missing[0]!r} is missing")
    return kind(
        **{
            name: layout.unions[name].decode(item, f"{where}.{name}")
            if name in layout.unions
            else _decode(layout.kinds[name], item, f"{where}.{name}")
            for name, item in data.items()
        }
    )


def _decode_items(kind: Any, data: Any, where: str) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"{where}: expected a list, found {type(data).__name__}")
    return [_decode(kind, item, f"{where}[{i}]") for i, item in enumerate(data)]
