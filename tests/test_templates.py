"""What GitHub reads beside workflows: a form with a mistake is not shown, and nobody is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import made_command_line

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".github/ISSUE_TEMPLATE"
FORMS = sorted(path for path in FOLDER.glob("*.yml") if path.name != "config.yml")
ELEMENTS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def document(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_has_what_github_asks_of_it(form: Path) -> None:
    content = document(form)
    assert set(content) <= {"name", "description", "title", "labels", "assignees", "body"}
    assert content["name"]
    assert content["description"]
    elements = content["body"]
    assert {element["type"] for element in elements} <= ELEMENTS
    fields = [element for element in elements if element["type"] != "markdown"]
    assert fields
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert all(element["attributes"]["value"] for element in elements if element["type"] == "markdown")


def test_there_is_a_form_for_errors_and_one_for_speed_and_weaknesses_go_elsewhere() -> None:
    assert [form.stem for form in FORMS] == ["bug", "speed"]
    (link,) = document(FOLDER / "config.yml")["contact_links"]
    assert set(link) == {"name", "url", "about"}
    assert "SECURITY.md" in link["about"]


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_names_commands_that_there_are(form: Path) -> None:
    group: Any = made_command_line.group()
    named = re.findall(r"`cudadent42 ([\w-]+)", form.read_text(encoding="utf-8"))
    options = {option for parameter in group.params for option in parameter.opts}
    assert set(named) <= set(group.commands) | options


def test_a_pull_request_is_asked_for_what_must_pass() -> None:
    text = (ROOT / ".github/pull_request_template.md").read_text(encoding="utf-8")
    assert all(name in text for name in (".ci/run", "CHANGELOG.md", "report.md"))
    assert text.count("- [ ]") >= 4


def test_the_citation_has_what_its_format_asks_for() -> None:
    citation = document(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert all(citation[key] for key in ("message", "title", "authors"))
    assert all(author["name"] for author in citation["authors"])
    assert citation["license"] == "MIT"
