"""What an agent may name, and what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.agents.project import Project
from cudadent42.base.errors import UsageError


@pytest.fixture
def project(tmp_path: Path) -> Project:
    root = tmp_path / "project"
    (root / "kernels").mkdir(parents=True)
    (root / "kernels/mine.py").touch()
    (root / "kernels/mine.toml").touch()
    (tmp_path / "secret.py").touch()
    (tmp_path / "project-beside").mkdir()
    (tmp_path / "project-beside/mine.py").touch()
    (root / "link.py").symlink_to(tmp_path / "secret.py")
    (root / "linked").symlink_to(tmp_path)
    return Project(root.resolve())


def test_files_of_the_project(project: Project) -> None:
    mine = project.root / "kernels/mine.py"
    assert project.implementation("kernels/mine.py:attention") == f"{mine}:attention"
    assert project.implementation(f"{mine}:attention") == f"{mine}:attention"
    assert project.implementation("kernels/../kernels/mine.toml") == str(mine.with_suffix(".toml"))
    assert project.suite("kernels/mine.toml") == str(mine.with_suffix(".toml"))


@pytest.mark.parametrize(
    "text",
    [
        "../secret.py:attention",
        "/etc/passwd.py:attention",
        "link.py:attention",
        "linked/secret.py:attention",
        "../project-beside/mine.py:attention",
        "../secret.toml",
        "~/secret.py:attention",
        "kernels/mine.py:attention; rm -rf /",
        "kernels/mine.py:__import__('os')",
        "kernels/mine.py:",
        "kernels:attention",
        "--timer",
        "-x",
        "",
        "a\0b.py:attention",
        "cudadent42[--block=1;x]",
    ],
)
def test_everything_else_is_refused(project: Project, text: str) -> None:
    with pytest.raises(UsageError):
        project.implementation(text)


def test_names_of_the_lab(project: Project) -> None:
    for name in ("pytorch", "cudadent42", "cudadent42[portable,block_n=48]", "flash-attn.3"):
        assert project.implementation(name) == name
    assert project.suite("default") == "default"
    for text in ("../other.toml", "/etc/suite.toml", "--suite", "a b"):
        with pytest.raises(UsageError):
            project.suite(text)


@pytest.mark.parametrize("text", ["HEAD", "main~1", "v1.0.0", "a/b", "HEAD^", "main@{1}", "0123abcd"])
def test_revisions(project: Project, text: str) -> None:
    assert project.revision(text) == text


@pytest.mark.parametrize(
    "text", ["", ".", "./old", "../old", "/old", "~/old", "--upload-pack=x", "a b", "a:b", "a\n"]
)
def test_what_is_no_revision_or_a_folder(project: Project, text: str) -> None:
    with pytest.raises(UsageError):
        project.revision(text)


@given(st.text(max_size=40))
def test_no_text_leads_out_of_the_project(text: str) -> None:
    project = Project(Path(__file__).resolve().parent)
    try:
        path = project.path(text)
    except UsageError:
        return
    assert path == project.root or project.root in path.parents
