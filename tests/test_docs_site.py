"""The documentation's site: what links become, and that every page has its place."""

from __future__ import annotations

import importlib.util
import pkgutil
import posixpath
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import flashmoe_science

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Files:
    """What MkDocs knows."""

    paths: set[str] = field(default_factory=set)

    def get_file_from_path(self, path: str) -> object | None:
        return path if path in self.paths else None


def hook() -> Any:
    specification = importlib.util.spec_from_file_location("docs_links", ROOT / "tools/docs_links.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[run](../benchmarks/results/2026-11-20-cpu-default)",
            "[run](../benchmarks/results/2026-11-20-cpu-default/report.html)",
        ),
        ("[code](../src/cudadent42/plan.py)", "code"),
        ("[page](report.md#reading-the-page)", "[page](report.md#reading-the-page)"),
        ("[gone](nowhere.md)", "[gone](nowhere.md)"),
        ("[site](https://example.org)", "[site](https://example.org)"),
        ("![picture](../src/x.svg)", "![picture](../src/x.svg)"),
        ("```\n[code](../src/cudadent42/plan.py)\n```", "```\n[code](../src/cudadent42/plan.py)\n```"),
    ],
)
def test_links_of_the_site(text: str, expected: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="docs/running.md"))
    files = Files({"docs/report.md", "benchmarks/results/2026-11-20-cpu-default/report.html"})
    assert hook().on_page_markdown(text, page, None, files) == expected


class Loader(yaml.SafeLoader):
    """MkDocs' own tags are of no matter here."""


def pages(entries: list[Any]) -> list[str]:
    return [
        page
        for entry in entries
        for value in entry.values()
        for page in (pages(value) if isinstance(value, list) else [value])
    ]


NAVIGATION = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]


def test_every_page_of_the_navigation_exists_and_every_guide_has_a_place() -> None:
    named = pages(NAVIGATION)
    assert [page for page in named if not (ROOT / page).is_file()] == []
    guides = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert guides <= set(named)


def test_a_kernels_page_says_how_it_works_and_its_notebook_what_was_tried() -> None:
    logs = re.compile(r"^#+ (?:What was tried\b.*|Log of variants)$|^\| (?:variant|idea) \|.*", re.MULTILINE)
    kernels = ROOT / "docs/kernels"
    assert {page.name: logs.findall(page.read_text(encoding="utf-8")) for page in kernels.glob("*.md")} == {
        page.name: [] for page in kernels.glob("*.md")
    }
    notebooks = {page.name for page in (kernels / "notebooks").iterdir()}
    unlinked = [
        name
        for name in sorted(notebooks)
        if f"notebooks/{name}" not in (kernels / name).read_text(encoding="utf-8")
    ]
    assert unlinked == []


def test_the_index_has_the_groups_of_the_navigation() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    groups = {
        section.partition("\n")[0]: sorted(
            posixpath.normpath(f"docs/{link}") for link in re.findall(r"\]\(([^)#]+)\)", section)
        )
        for section in index.split("\n## ")[1:]
    }
    sections = {title: entries for group in NAVIGATION for title, entries in group.items()}
    assert groups == {
        title: sorted(pages(entries)) for title, entries in sections.items() if isinstance(entries, list)
    }


DOCUMENTED = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_reference_has_every_public_name() -> None:
    assert set(flashmoe_science.__all__) - {name.rpartition(".")[2] for name in DOCUMENTED} == set()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_the_reference_names_is_there_and_says_what_it_is(name: str) -> None:
    assert pkgutil.resolve_name(name).__doc__


def test_the_site_builds() -> None:
    if importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("MkDocs is not installed: pip install --group docs")
    done = subprocess.run(
        [ROOT / "tools/build_docs.sh"],
        env={"CUDADENT42_PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "flash_attention" in (ROOT / "build/site/docs/api.html").read_text()
