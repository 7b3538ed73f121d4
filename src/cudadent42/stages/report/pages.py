"""What every page has in common: where its template comes from and what it looks like."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cudadent42.stages.report import svg

_TEMPLATES = Path(__file__).parent / "templates"


def environment(*folders: Path) -> Environment:
    """Templates of these folders and those of all pages. What they fill in is escaped."""
    return Environment(
        loader=FileSystemLoader([*folders, _TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def style(sheet: svg.Sheet) -> Markup:
    """The style sheet of a page, with the palettes and the styles of its pictures, which must all be drawn."""
    palette = f":root{{{svg.variables(dark=False)}}}"
    palette += f"@media (prefers-color-scheme:dark){{:root{{{svg.variables(dark=True)}}}}}"
    # Paper is white whatever the screen is.
    palette += f"@media print{{:root{{{svg.variables(dark=False)}}}}}"
    css = (_TEMPLATES / "page.css").read_text(encoding="utf-8")
    return Markup(palette + svg.classes() + sheet.css() + css)
