"""A kernel's file as text: what `cudadent42.native.specification` reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from cudadent42.base.errors import UsageError


def kernel_file_text(document: Mapping[str, Any], comment: str = "") -> str:
    """The TOML text of a kernel's file. Raises UsageError for a value that no such file needs."""
    head = [f"# {comment}"] if comment else []
    head += [f"{_key(name)} = {_value(value)}" for name, value in document.items() if name != "configuration"]
    blocks = [
        "\n".join(
            ["", "[[configuration]]", *(f"{_key(name)} = {_value(value)}" for name, value in each.items())]
        )
        for each in document.get("configuration", ())
    ]
    return "\n".join([*head, *blocks]) + "\n"


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _quoted(name)


def _quoted(text: str) -> str:
    """A JSON text is a basic string of TOML, but for the one control character that JSON lets stand."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(name)} = {_value(item)}" for name, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    raise UsageError(f"a kernel's file holds {value!r}, which no kernel's file needs")
