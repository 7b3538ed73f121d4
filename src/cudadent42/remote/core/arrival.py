"""What comes back from the far side: no more than this disk can bear, nothing that leads out of its folder, and on the
disk before whoever asked for it can go on to remove it there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import IO

from cudadent42.base import archives, durable
from cudadent42.base.archives import Limits

MOST_BYTES = 8 << 30
"""Of one archive. A run folder has megabytes, one with profiles a few hundred; without an end to it, a far side that
goes wrong could fill this disk."""
MOST_FILES = 100_000
"""In one archive. A run folder has dozens; each costs an inode and a flush here."""


class Limited:
    """A file that is written up to ``MOST_BYTES``."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._written = 0

    def write(self, chunk: bytes) -> None:
        """Raises archives.TooMuchError, OSError."""
        self._written += len(chunk)
        _limits().check_bytes(self._written)
        self._file.write(chunk)


def unpack(packed: Path, name: str, folder: Path) -> Path:
    """The folder ``name`` of a tar archive, below the new ``folder`` and on the disk.

    Raises:
        archives.DamagedError: it is no archive, or has no such folder.
        archives.TooMuchError: it holds more than is taken.
        OSError: the disk does not take it.
    """
    archives.unpack(packed, folder, _limits())
    unpacked = folder / name
    if not unpacked.is_dir():
        raise archives.DamagedError("it is not in it")
    durable.flush_tree(unpacked)
    return unpacked


def place(unpacked: Path, target: Path) -> None:
    """Move what ``unpack`` gave to ``target``, in place of what may be there, and flush that. Raises OSError."""
    if target.exists():
        shutil.rmtree(target)
    os.replace(unpacked, target)
    durable.flush(target.parent)


def _limits() -> Limits:
    return Limits(most_bytes=MOST_BYTES, most_files=MOST_FILES)
