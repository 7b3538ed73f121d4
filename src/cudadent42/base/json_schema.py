"""JSON Schemas of records, from their dataclasses: what `serialise.encode` writes, and `serialise.decode` reads.

Draft 2020-12. Descriptions are the docstrings of classes and fields, so nothing is said twice.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from cudadent42.base.serialise import TAGGED, Tagged

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]

_NUMBER = "number"
_NUMBER_SCHEMA: Schema = {
    "description": "A number, or the word for one that JSON lacks.",
    "anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}],
}
_PLAIN: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    str: {"type": "string"},
    Path: {"type": "string"},
    type(None): {"type": "null"},
    Any: {},
}


def schema_of(kind: type[Any]) -> Schema:
    """The schema of a record's JSON, whole in itself."""
    builder = Builder()
    return builder.whole(builder.body(kind))


class Builder:
    """Makes schemas that share their definitions. Raises TypeError for a type that `serialise` cannot read."""

    def __init__(self) -> None:
        self._definitions: dict[str, Schema] = {}
        self._names: dict[type[Any], str] = {}

    def whole(self, body: Schema) -> Schema:
        """``body`` with the definitions that it refers to."""
        return {**body, **({"$defs": dict(sorted(self._definitions.items()))} if self._definitions else {})}

    def of(self, kind: Any) -> Schema:
        """Of any type that a record's field may have; records by reference."""
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if kind in _PLAIN:
            return dict(_PLAIN[kind])
        if kind is float:
            self._definitions[_NUMBER] = _NUMBER_SCHEMA
            return {"$ref": f"#/$defs/{_NUMBER}"}
        if origin in (typing.Union, types.UnionType):
            return {"anyOf": [self.of(member) for member in arguments]}
        if origin is list or (origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis):
            return {"type": "array", "items": self.of(arguments[0])}
        if origin is dict:
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if isinstance(kind, type) and issubclass(kind, Enum):
            return {"enum": [member.value for member in kind]}
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return self._reference(kind)
        raise TypeError(f"no schema for {kind}")

    def body(self, kind: type[Any]) -> Schema:
        """Of a record, in place."""
        hints = typing.get_type_hints(kind)
        described = _field_docstrings(kind)
        properties: dict[str, Schema] = {}
        for field in dataclasses.fields(kind):
            tagged: Tagged | None = field.metadata.get(TAGGED)
            schema = self.of(hints[field.name]) if tagged is None else self._tagged(tagged, hints[field.name])
            if field.name in described:
                schema = {"description": described[field.name], **schema}
            properties[field.name] = schema
        required = [field.name for field in dataclasses.fields(kind) if _is_required(field)]
        return {
            **_described(kind),
            "type": "object",
            "properties": properties,
            **({"required": required} if required else {}),
            "additionalProperties": False,
        }

    def _reference(self, kind: type[Any]) -> Schema:
        if kind not in self._names:
            taken = set(self._names.values())
            name = kind.__name__
            if name in taken:
                name = f"{kind.__module__.rpartition('.')[2]}.{name}"
            self._names[kind] = name
            self._definitions[name] = {}  # a record may hold itself
            self._definitions[name] = self.body(kind)
        return {"$ref": f"#/$defs/{self._names[kind]}"}

    def _tagged(self, tagged: Tagged, hint: Any) -> Schema:
        """Of a union whose members other packages may add to: theirs are any object that says what it is."""
        members = []
        for name in tagged.names():
            kind = tagged.type_of(name)
            body = self.body(kind)
            fields = body["properties"]
            told = tagged.untagged(fields) == name
            members.append(
                {
                    **body,
                    "properties": {tagged.key: {"const": name}, **fields},
                    "required": [*([] if told else [tagged.key]), *body.get("required", ())],
                }
            )
        others = {"type": "string", "not": {"enum": list(tagged.names())}}
        members.append({"type": "object", "properties": {tagged.key: others}, "required": [tagged.key]})
        union = {"anyOf": members}
        return {"type": "array", "items": union} if typing.get_origin(hint) is tuple else union


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _described(kind: type[Any]) -> Schema:
    text = kind.__doc__ or ""
    made_up = text.startswith(f"{kind.__name__}(")  # by dataclass, where the class has none
    return {"title": kind.__name__} if made_up else {"title": kind.__name__, "description": _prose(text)}


def _field_docstrings(kind: type[Any]) -> dict[str, str]:
    """By field, the string that stands below it in the class's source."""
    docstrings: dict[str, str] = {}
    for each in reversed(inspect.getmro(kind)):
        if dataclasses.is_dataclass(each):
            docstrings.update(_below_fields(each))
    return docstrings


def _below_fields(kind: type[Any]) -> Iterator[tuple[str, str]]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            yield field.target.id, _prose(below.value.value)


def _prose(docstring: str) -> str:
    """On one line, with code in single backquotes."""
    return " ".join(docstring.replace("``", "`").split())
