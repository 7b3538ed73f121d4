"""Text in Markdown, shown as it is: no markup, no mention, no cell of a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from cudadent42.model import text

_SPECIAL = re.compile(r"([\\`*_\[\]|~$@])")


def escape(words: str) -> str:
    """Text that Markdown shows as it is: no markup, no mention, no table cell."""
    return _SPECIAL.sub(_entity, _entities(text.clean(words)))


def cells(row: Mapping[str, object], *columns: str) -> str:
    """A line of a table."""
    return "| " + " | ".join(escape(str(row[column])) for column in columns) + " |"


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values."""
    return "\n".join(
        ["| | |", "| --- | --- |", *(f"| {escape(name)} | {escape(value)} |" for name, value in rows)]
    )


def commands(lines: str) -> str:
    """Lines for a shell as they are typed. In a fence of backticks neither ``<`` nor backticks could be escaped."""
    return f"<pre><code>{_entities(lines)}</code></pre>"


def _entities(words: str) -> str:
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _entity(match: re.Match[str]) -> str:
    sign = match.group()
    return {"|": "&#124;", "@": "&#64;"}.get(sign, f"\\{sign}")
