"""A project under git, a workshop that is quick and a toy clock."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# For quick.py and acting.py: in importlib's import mode a test's folder is not on the path.
sys.path.insert(0, str(Path(__file__).parent))

from quick import QuickWorkshop, ToyClock, git

from settings_of_git import list_settings_once


@pytest.fixture(autouse=True, scope="module")
def _settings() -> Iterator[None]:
    """Every second process of git asks for a repository's settings."""
    with pytest.MonkeyPatch.context() as patch:
        list_settings_once(patch.setattr)
        yield


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q")
    git(folder, "config", "user.email", "test@localhost")
    git(folder, "config", "user.name", "test")
    (folder / "kernel.py").write_text("REPEATS = 3\n\n\ndef attention():\n    return REPEATS\n")
    (folder / "other.py").write_text("BLOCK = 64\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def clock() -> ToyClock:
    return ToyClock()


@pytest.fixture
def workshop() -> QuickWorkshop:
    return QuickWorkshop()
