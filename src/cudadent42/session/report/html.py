"""``report.html``: one file that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from cudadent42.session.report.view import View
from cudadent42.stages.report import pages, svg


def render(view: View) -> str:
    """The page."""
    template = pages.environment(Path(__file__).parent).get_template("session.html.j2")
    return template.render(
        view=view, css=pages.style(svg.Sheet()), contents=[], version=view.state.started.version
    )
