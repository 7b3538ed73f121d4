"""A section of a report: on the page, and in the comment on a pull request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View


@dataclass(frozen=True)
class Text:
    """What a section says in ``report.md``."""

    order: int
    """Among the texts of all sections, which are in another order than on the page: what decides comes first."""
    parts: Callable[[View], Iterable[str]]
    """Paragraphs of Markdown, escaped (`escaping`); empty ones are left out."""
    fold: str = ""
    """The title of what is folded away, after all that is shown; empty for what is shown."""


@dataclass(frozen=True)
class Section:
    """One section."""

    name: str
    """Of its anchor, ``h-NAME``."""
    title: str | Callable[[View], str]
    html: str
    """What stands below its title in ``report.html``: a template of Jinja. It knows the `View` as ``view``, the margin
    as ``margin``, the macros ``facts`` and ``verdict`` of ``parts.html.j2``, and what ``filled`` gives."""
    filled: Callable[[View, Sheet], Mapping[str, Any] | None]
    """What its template fills in, all escaped unless it is Markup; pictures are drawn on the sheet. None where the
    section does not apply to a run."""
    long: bool = True
    """It may be broken between two printed pages."""
    texts: tuple[Text, ...] = ()

    def title_of(self, view: View) -> str:
        return self.title if isinstance(self.title, str) else self.title(view)
