"""The documentation's site: what links become, and that every page has its place."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

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


def test_every_page_of_the_navigation_exists_and_every_guide_has_a_place() -> None:
    class Loader(yaml.SafeLoader):
        """MkDocs' own tags are of no matter here."""

    def pages(entries: list[Any]) -> list[str]:
        return [
            page
            for entry in entries
            for value in entry.values()
            for page in (pages(value) if isinstance(value, list) else [value])
        ]

    named = pages(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    assert [page for page in named if not (ROOT / page).is_file()] == []
    guides = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert guides <= set(named)


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
