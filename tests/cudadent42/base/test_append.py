"""Files that are only appended to, as sessions and bisections keep their steps in them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudadent42.base.append import AppendOnlyFile, append_lines, whole_lines


@settings(max_examples=25)
@given(
    st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"])), max_size=4),
    st.binary(),
)
def test_a_torn_last_line_is_cut_off_and_costs_no_other(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], torn: bytes
) -> None:
    path = tmp_path_factory.mktemp("append") / "lines"
    whole = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(whole + torn.replace(b"\n", b""))
    assert whole_lines(path.read_bytes()) == whole
    with AppendOnlyFile(path) as file:
        file.append("next")
        assert file.appended == 1
    assert path.read_bytes() == whole + b"next\n"


def test_a_torn_line_of_any_length_is_found(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"whole\n" + b"x" * 200_000)
    with AppendOnlyFile(path):
        assert path.read_bytes() == b"whole\n"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_or_is_interrupted_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Half of a line that stayed would make one damaged line of two."""
    path = tmp_path / "lines"
    with AppendOnlyFile(path, create=True) as file:
        file.append("first")
        written = os.write

        def half(descriptor: int, data: bytes) -> int:
            monkeypatch.setattr(os, "write", fails)
            return written(descriptor, data[: len(data) // 2])

        def fails(descriptor: int, data: bytes) -> int:
            raise error

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(type(error)):
            file.append("second, which does not fit")
        monkeypatch.setattr(os, "write", written)
        assert file.appended == 1
        file.append("third")
    assert path.read_text() == "first\nthird\n"


def test_only_who_asks_makes_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        AppendOnlyFile(tmp_path / "lines")


def test_lines_of_several_writers_survive_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_lines(path, ["one", "two"])
    with path.open("ab") as file:
        file.write(b'{"cut')
    append_lines(path, ["three"])
    assert [line for line in path.read_text().split("\n") if line] == ["one", "two", '{"cut', "three"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_lines_that_find_no_room_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda descriptor, data: len(data) - 1)
    with pytest.raises(OSError, match="the disk is full"):
        append_lines(tmp_path / "lines", ["one"])
