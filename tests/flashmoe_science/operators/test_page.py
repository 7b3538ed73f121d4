"""docs/compile.md lists every operator as its schema is."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from flashmoe_science.operators.library import LIBRARY

PAGE = Path(__file__).resolve().parents[3] / "docs" / "compile.md"


def test_every_operator_is_listed_with_its_arguments_and_defaults() -> None:
    listed = dict(re.findall(r"^\| `(\w+)\(([^`]*)\)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    defined = {name.partition("::")[2] for name in LIBRARY._op_defs}
    assert listed.keys() == defined
    for name, shown in listed.items():
        schema = getattr(torch.ops.flashmoe_science, name).default._schema
        expected = [
            f"{each.name}={said(each.default_value)}" if each.has_default_value() else each.name
            for each in schema.arguments
        ]
        assert shown == ", ".join(expected), name


def said(value: object) -> str:
    """As Python writes it, on this page."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list) and len(value) > 3:
        return f"[{value[0]}] * {len(value)}"
    return repr(value)
