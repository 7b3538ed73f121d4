"""The skill that coding agents load says what AGENTS.md says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from cudadent42.agents.tools import TOOLS
from cudadent42.base.errors import ExitCode

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    specification = importlib.util.spec_from_file_location("update_skill", ROOT / "tools/update_skill.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_skill_is_that_of_the_rules(tool: ModuleType) -> None:
    made = tool.skill((ROOT / "AGENTS.md").read_text(encoding="utf-8"))
    assert tool.SKILL.read_text(encoding="utf-8") == made, "run tools/update_skill.py"


def test_every_part_of_it_is_in_the_rules(tool: ModuleType) -> None:
    rules = tool.sections((ROOT / "AGENTS.md").read_text(encoding="utf-8"))
    taken = tool.sections(tool.SKILL.read_text(encoding="utf-8"))
    assert tuple(taken) == tool.SECTIONS
    assert all(rules[title] == text for title, text in taken.items())


def test_a_section_that_is_gone_is_an_error(tool: ModuleType) -> None:
    with pytest.raises(KeyError, match="Rules"):
        tool.skill((ROOT / "AGENTS.md").read_text(encoding="utf-8").replace("## Rules", "## Advice"))


def test_its_head_is_what_programs_that_load_skills_read(tool: ModuleType) -> None:
    head = tool.SKILL.read_text(encoding="utf-8").split("---\n")[1]
    document = yaml.safe_load(head)
    assert set(document) == {"name", "description"}
    assert document["name"] == tool.SKILL.parent.name
    assert re.fullmatch(r"[a-z0-9-]{1,64}", document["name"])
    assert 0 < len(document["description"]) <= 1024


def test_it_names_every_tool_and_every_exit_code(tool: ModuleType) -> None:
    parts = tool.sections(tool.SKILL.read_text(encoding="utf-8"))
    assert {name for name in TOOLS if f"`{name}`" not in parts["As a server of tools"]} == set()
    rows = re.findall(r"^\| (\d+) \|", parts["Exit codes"], re.MULTILINE)
    assert sorted(map(int, rows)) == sorted(map(int, ExitCode))


def test_it_leads_to_no_page_that_is_not_beside_it(tool: ModuleType) -> None:
    assert re.findall(r"\]\(([^)]+)\)", tool.SKILL.read_text(encoding="utf-8")) == []
