"""A journal's folder may come from elsewhere: links and pipes in the place of its files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.base.journal import LOCK, Files, Journal

FILES = Files("about.json", "entries.jsonl", "numbers")


@dataclass(frozen=True)
class About:
    schema_version: int = 1


@dataclass(frozen=True)
class Entry:
    number: int


def opened(folder: Path) -> Journal[About, Entry]:
    return Journal(folder, FILES, About(), About, Entry)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with opened(tmp_path / "journal") as journal:
        journal.append(Entry(1))
    return tmp_path / "journal"


@pytest.mark.parametrize("name", [LOCK, FILES.entries])
def test_a_link_is_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    """Also one that leads to nothing yet: a file would be made there."""
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="cannot"):
        opened(folder)
    assert not (tmp_path / "elsewhere").exists()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [a_pipe, a_folder])
@pytest.mark.parametrize("name", [FILES.entries, FILES.setup])
def test_what_is_no_file_is_an_error(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    (folder / name).unlink()
    make(folder / name)
    with pytest.raises(UsageError):
        opened(folder)


def test_a_pipe_in_the_place_of_the_lock_is_not_waited_for(folder: Path) -> None:
    (folder / LOCK).unlink()
    os.mkfifo(folder / LOCK)
    with opened(folder) as journal:
        assert journal.entries == (Entry(1),)


def test_one_process_at_a_time(folder: Path) -> None:
    with opened(folder), pytest.raises(UsageError, match="in use by another process"):
        opened(folder)
    with opened(folder) as journal:
        assert journal.entries == (Entry(1),)
