"""``report.md``."""

from __future__ import annotations

from collections.abc import Sequence

from cudadent42.session.report.view import Row, View
from cudadent42.stages.report.escaping import escape


def render(view: View) -> str:
    """The report as GitHub-flavoured Markdown."""
    parts = [
        f"### Session {escape(view.name)}: {escape(view.headline)}",
        escape(view.cost),
        escape(view.reason),
        _table(("checkpoint", "planned min", "actual min", "difference", ""), view.minutes),
        _section(
            "Changes", _table(("", "what changed", "verdict", "speed-up", "95 % interval", ""), view.attempts)
        ),
        _section("Tried, and did not hold", _list(view.failed)),
        _section("What limits it", escape(view.diagnosis)),
        _section("Gates", _list(view.gates)),
        _section("Lessons that fired", _list(view.lessons)),
        _section("Notes", _list(view.notes)),
        _section("To be known when reading this", _list(view.remarks)),
        _section(
            "Runs", _table(("folder", "", "verdict", "speed-up", "95 % interval", "samples"), view.runs)
        ),
        f"<sub>cudadent42 {escape(view.state.started.version)}, {escape(view.state.first.time)}</sub>",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, body: str) -> str:
    return f"#### {title}\n\n{body}" if body else ""


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"* {escape(line)}" for line in lines)


def _table(head: Row, rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = [head, tuple("---" for _ in head), *(tuple(escape(cell) for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
