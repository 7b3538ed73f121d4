"""Reading files that anybody may have written: whole ones of a bounded size, JSON of bounded depth and numbers.

All that can go wrong with their content is a ValueError, so that a caller has one word for it. A parser may as well
run out of stack or memory, and numbers that a float holds overflow in what is computed from them.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from cudadent42.base.errors import UsageError

MOST_BYTES = 256 << 20
"""Of a file that is read whole. A manifest has some 100 kB, the samples of the longest race some 20 MB."""

MOST_LEVELS = 100
"""Of lists in lists. Records have less than ten."""

LARGEST = 1e100
"""Of the size of any number. Squares and products of those in a record are then numbers still."""

_LARGEST_INTEGER = 1 << 64


def read_text(path: Path, errors: str = "strict", most_bytes: int = MOST_BYTES) -> str:
    """A regular file as text. Raises OSError (also: too large, no file), and ValueError where it is not UTF-8."""
    return read_bytes(path, most_bytes).decode("utf-8", errors=errors)


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """A regular file. Raises OSError (also: too large, no file)."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes; expected {most_bytes:,} at most")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes")
    return content


def open_file(path: Path) -> BinaryIO:
    """A regular file, open for reading. Raises OSError, also where it is something else."""
    # Opening a pipe would wait for somebody who writes into it.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file")
    return open(descriptor, "rb")


def parse_json(text: str | bytes) -> Any:
    """A JSON document. Raises ValueError, as also for what JSON has no word for (NaN, infinities, numbers as large)."""
    try:
        document = json.loads(text, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deep") from error
    except MemoryError as error:
        raise ValueError("it does not fit into memory") from error
    check_values(document, infinities=False)
    return document


def read_json(path: Path) -> Any:
    """A file of one JSON document. Raises OSError, ValueError."""
    return parse_json(read_text(path))


def check_values(document: Any, *, integers: bool = True, infinities: bool = True) -> None:
    """Raises ValueError where a parsed document is nested too deep, or has a number that nothing can be done with.

    ``integers``: these too; not where each has bounds of its own. ``infinities``: they have a meaning, as in TOML; a
    number in JSON that is read as one, 1e400, has more digits than can be held.
    """
    level = [document]
    for _ in range(MOST_LEVELS):
        deeper: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                deeper.extend(value.values())
            elif isinstance(value, list):
                deeper.extend(value)
            elif isinstance(value, float):
                if not infinities and not math.isfinite(value):
                    raise ValueError("a number is out of range")
                in_range(value)
            elif integers and isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
                raise ValueError("a number of more than 64 bits is out of range")
        if not deeper:
            return
        level = deeper
    raise ValueError(f"lists or objects are nested more than {MOST_LEVELS} deep")


def in_range(value: float) -> float:
    """``value``. Raises ValueError where nothing can be done with it; infinities and NaN have a meaning."""
    if math.isfinite(value) and abs(value) > LARGEST:
        raise ValueError(f"the number {value:g} is out of range")
    return value


def expanded(text: str | Path) -> Path:
    """A path that a user wrote, which may begin with ``~`` or ``~somebody``. Raises UsageError where nobody has that
    name."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{str(text)!r}: {error}; write the whole path") from error


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")
