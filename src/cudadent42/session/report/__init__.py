"""The report of a session: planned against actual minutes, cost, what was tried and what came of it, lessons."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cudadent42.base.files import write_text
from cudadent42.session.clock import now
from cudadent42.session.folder import load
from cudadent42.session.report.view import View
from cudadent42.session.words import as_of


@dataclass(frozen=True)
class Paths:
    html: Path
    markdown: Path


def write(folder: Path) -> Paths:
    """Write ``report.html`` and ``report.md`` into a session folder, whether or not the session has ended.

    Raises UsageError where the folder cannot be read or written to.
    """
    from cudadent42.session.report import html, markdown

    session = load(folder)
    view = View(session.name, as_of(session.state, now()))
    paths = Paths(folder / "report.html", folder / "report.md")
    write_text(paths.html, html.render(view))
    write_text(paths.markdown, markdown.render(view))
    return paths
