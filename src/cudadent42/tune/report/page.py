"""``report.html``: one file that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from cudadent42.base.files import write_text
from cudadent42.stages.report import pages, svg
from cudadent42.tune.journal import read
from cudadent42.tune.report.figures import heat_map, ratios, regions, survivors
from cudadent42.tune.report.view import view_of
from cudadent42.tune.state import State, fold

PAGE = "report.html"

_MOST_SLICES = 12
"""Cases whose slice is drawn."""


def write(folder: Path) -> Path:
    """The report of the tuning in ``folder``, as far as that has come. Raises UsageError."""
    setup, entries = read(folder)
    path = folder / PAGE
    write_text(path, render(folder, fold(setup, entries)))
    return path


def render(folder: Path, state: State) -> str:
    """The page."""
    sheet = svg.Sheet()
    cases = list(state.cases.values())[:_MOST_SLICES]
    slices = [(case.case, Markup(heat_map(state, case, sheet, number))) for number, case in enumerate(cases)]
    drawn = {"survivors": survivors, "ratios": ratios, "regions": regions}
    pictures = {name: Markup(draw(state, sheet)) for name, draw in drawn.items()}
    template = pages.environment(Path(__file__).parent).get_template("tuning.html.j2")
    return template.render(
        view=view_of(folder, state),
        css=pages.style(sheet),
        contents=[],
        pictures=pictures,
        slices=[(name, picture) for name, picture in slices if picture],
        version=state.setup.version,
    )
