"""A section of the report is one module: on the page, in its contents, and in the comment on a pull request."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cudadent42.runs.run_folder import RunFolder
from cudadent42.stages.report import html, markdown, sections
from cudadent42.stages.report.escaping import escape
from cudadent42.stages.report.section import Section, Text
from cudadent42.stages.report.sections import SECTIONS
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View


def filled(view: View, sheet: Sheet) -> dict[str, Any] | None:
    return {"moon": "<b>full</b>"} if view.timed else None


def lines(view: View) -> Iterator[str]:
    yield f"The moon is {escape('<full>')}."


MOON = Section(
    "moon",
    lambda view: f"The moon during {view.name}",
    "<p>{{ moon }}, within ±{{ margin }}</p>",
    filled,
    texts=(Text(0, lines), Text(1000, lines, fold="The moon")),
)


@pytest.fixture
def with_the_moon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (html, markdown):
        monkeypatch.setattr(module, "SECTIONS", (*SECTIONS, MOON))


def test_every_module_of_a_section_is_in_the_list_once() -> None:
    modules = [name for _, name, _ in pkgutil.iter_modules(sections.__path__)]
    assert sorted(modules) == sorted(name for name in modules if getattr(sections, name).SECTION in SECTIONS)
    assert len(SECTIONS) == len(modules)
    names = [section.name for section in SECTIONS]
    assert len(set(names)) == len(names)
    orders = [each.order for section in SECTIONS for each in section.texts]
    assert len(set(orders)) == len(orders)


@pytest.mark.usefixtures("with_the_moon")
def test_a_new_section_is_on_the_page_and_in_its_contents(small: RunFolder) -> None:
    view = View(small)
    page = html.render(view)
    title = f"The moon during {view.name}"
    assert f'<section class="long" aria-labelledby="h-moon">\n<h2 id="h-moon">{title}</h2>' in page
    assert f'<li><a href="#h-moon">{title}</a></li>' in page
    assert re.search(r"<p>&lt;b&gt;full&lt;/b&gt;, within ±\d", page)
    assert page.index('id="h-reproduce"') < page.index('id="h-moon"')


@pytest.mark.usefixtures("with_the_moon")
def test_what_it_says_in_the_comment_is_in_its_order(small: RunFolder) -> None:
    text = markdown.render(View(small))
    shown = text.index("The moon is &lt;full&gt;.")
    assert shown < text.index("| case | dtype |")
    assert text.index("<details><summary>The moon</summary>") > text.index("<summary>Reproduce</summary>")


@pytest.mark.usefixtures("with_the_moon")
def test_one_that_does_not_apply_is_not_on_the_page(run: RunFolder) -> None:
    assert "h-moon" not in html.render(View(replace(run, results=None)))
