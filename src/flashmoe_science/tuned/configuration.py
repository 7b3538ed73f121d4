"""Settings of a table, put into a kernel's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import TypeVar, get_type_hints

from flashmoe_science.errors import InputError

_MOST = 1 << 20
"""Of any number in a configuration: beyond what a multiprocessor has of anything."""

ConfigurationT = TypeVar("ConfigurationT")


def changed(configuration: ConfigurationT, changes: Mapping[str, object]) -> ConfigurationT:
    """With these fields, and everything else as it is. A dot leads into a part: ``up.stages``."""
    own = {field: value for field, value in changes.items() if "." not in field}
    for part in {field.partition(".")[0] for field in changes if "." in field}:
        inner = {
            field.partition(".")[2]: value for field, value in changes.items() if field.startswith(f"{part}.")
        }
        own[part] = changed(getattr(configuration, part), inner)
    return replace(configuration, **own)  # type: ignore[type-var]


def typed(
    configuration: type, settings: Mapping[str, object], tunable: Mapping[str, int]
) -> dict[str, object]:
    """Plain values as the fields of a configuration hold them. Raises InputError for what it has no place for.

    Args:
        tunable: the fields that may be set, and the least value of those that are numbers.
    """
    values: dict[str, object] = {}
    for name, value in settings.items():
        kind = configuration
        for part in name.split("."):
            names = {field.name for field in fields(kind)} if is_dataclass(kind) else set()
            if part not in names:
                raise InputError(f"{configuration.__name__} has no field {name!r}")
            kind = get_type_hints(kind)[part]
        if name not in tunable:
            raise InputError(f"{name} cannot be tuned; expected some of {', '.join(tunable)}")
        try:
            values[name] = kind(value) if issubclass(kind, Enum) else value
        except ValueError as error:
            raise InputError(f"{name} cannot be {value!r}") from error
        if not isinstance(values[name], kind) or (kind is int and isinstance(value, bool)):
            raise InputError(f"{name} cannot be {value!r}")
        if kind is int and not tunable[name] <= value <= _MOST:  # type: ignore[operator]
            raise InputError(f"{name} cannot be {value}; expected {tunable[name]} to {_MOST}")
    return values
