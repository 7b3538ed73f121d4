"""Files of anybody are read within limits: a hole of 200 GB, a pipe nobody writes into, a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.base.reading import open_file, parse_json, read_bytes
from cudadent42.patterns import evidence, lessons
from cudadent42.remote.core.tree import read_tree
from cudadent42.session import log, protocol, snapshots


def hole(path: Path) -> None:
    path.touch()
    os.truncate(path, 200 << 30)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


READERS: tuple[Callable[[Path], object], ...] = (
    log.read,
    snapshots._read,
    lessons.load,
    lambda path: protocol.read_text(path, "the protocol"),
)


@pytest.mark.parametrize("make", [hole, pipe, device])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_of_a_session(
    reader: Callable[[Path], object], make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "file")
    with pytest.raises(UsageError, match="file"):
        reader(tmp_path / "file")


@pytest.mark.parametrize("make", [pipe, device])
def test_a_log_that_is_none(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "file")
    with pytest.raises(UsageError, match="expected a log file"):
        evidence.of_file(tmp_path / "file")


def test_what_would_be_sent(tmp_path: Path) -> None:
    """A tracked file that became a pipe."""
    os.system(f"git init -q {tmp_path} && touch {tmp_path}/kernel.py && git -C {tmp_path} add -A")
    (tmp_path / "kernel.py").unlink()
    pipe(tmp_path / "kernel.py")
    with pytest.raises(
        UsageError, match=r"kernel.py cannot be read \(it is not a file\), and it would be sent"
    ):
        read_tree(tmp_path)


def test_limits(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes; expected 4 at most"):
        read_bytes(tmp_path / "file", 4)
    with pytest.raises(OSError, match="not a file"):
        open_file(tmp_path)


@pytest.mark.parametrize(
    "text", ["1e400", "[-1e400]", '{"a": {"b": [1e400]}}', "NaN", "Infinity", "1e101", str(1 << 65)]
)
def test_numbers_that_json_or_nobody_has(text: str) -> None:
    """1e400 is read as infinity, of which no whole number can be made."""
    with pytest.raises(ValueError, match=r"out of range|is no JSON"):
        parse_json(text)
