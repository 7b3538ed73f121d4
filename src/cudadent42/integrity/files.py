"""Files that a run's processes read while candidates run, or later: the lab, its kernels as source and compiled, the
baseline's own file.

Who writes to one of them runs code of its own in the process that decides, or slows the baseline in every process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

Identity = tuple[int, int, int, int]
"""Inode, size, and when the contents and the file itself were changed last, which no user can set back."""


class Files:
    """As they are when it is made: those of ``paths``, and all that lie in folders of these."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._seen: Mapping[str, Identity] = {
            name: identity
            for path in paths
            for name in _below(path)
            if (identity := _identity(name)) is not None
        }

    def __len__(self) -> int:
        return len(self._seen)

    def written(self) -> list[str]:
        """Names of those that are others now. One that is gone is none: whoever needs it says so."""
        return sorted(
            name for name, seen in self._seen.items() if (now := _identity(name)) is not None and now != seen
        )


def _below(path: Path) -> Iterator[str]:
    """Not bytecode: Python writes it by itself."""
    if not path.is_dir():
        yield str(path)
        return
    for folder, folders, names in os.walk(path):
        if "__pycache__" in folders:
            folders.remove("__pycache__")
        yield from (os.path.join(folder, name) for name in names)


def _identity(name: str) -> Identity | None:
    try:
        status = os.stat(name)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
