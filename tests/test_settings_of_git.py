"""What git is asked once is told again only where it would say the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cudadent42.base import git
from settings_of_git import list_settings_once, what_settings_follow_from


def told(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "own"))
    folder = tmp_path / "repository"
    told(tmp_path, "init", "-q", str(folder))
    return folder


def test_it_is_asked_once_for_the_same_settings(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    ask = git._programs_off

    def counted(*words: object) -> tuple[tuple[str, str], ...]:
        asked.append(words)
        return ask(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(git, "_programs_off", counted)
    list_settings_once(monkeypatch.setattr)

    def off() -> dict[str, str]:
        return dict(git._programs_off(repository, git.surroundings(), 60.0))

    assert off() == off() == {}
    assert len(asked) == 1
    told(repository, "config", "diff.external", "cat")
    assert off() == off() == {"diff.external": ""}
    assert len(asked) == 2
    told(repository, "config", "--global", "diff.external", "tr a b")
    assert off() == {"diff.external": "tr a b"}
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "diff.external")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "tr a c")
    assert off() == {"diff.external": "tr a c"}
    assert len(asked) == 4


def test_where_it_is_asked_each_time(repository: Path, tmp_path: Path) -> None:
    def follow(folder: Path) -> object:
        return what_settings_follow_from(folder, git.surroundings())

    (repository / "inner").mkdir()
    assert follow(repository / "inner") == follow(repository)
    assert follow(repository) is not None
    assert follow(repository / ".git") is None
    told(tmp_path, "init", "-q", "--bare", str(repository / "bare"))
    assert follow(repository / "bare") is None
    told(repository, "config", "include.path", "../more")
    assert follow(repository) is None
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".git").write_text(f"gitdir: {repository / '.git'}\n")
    assert follow(tmp_path / "linked") is None
