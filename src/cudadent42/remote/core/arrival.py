"""What comes back from the far side: no more than this disk can bear, nothing that leads out of its folder, and on the
disk before whoever asked for it can go on to remove it there."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from cudadent42.base import durable
from cudadent42.base.errors import LabError

MOST_BYTES = 8 << 30
"""Of one archive. A run folder has megabytes, one with profiles a few hundred; without an end to it, a far side that
goes wrong could fill this disk."""
MOST_FILES = 100_000
"""In one archive. A run folder has dozens; each costs an inode and a flush here."""


class DamagedError(LabError):
    """It is not the archive that was asked for."""


class TooMuchError(LabError):
    """It is more than is taken."""


class Limited:
    """A file that is written up to ``MOST_BYTES``."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._written = 0

    def write(self, chunk: bytes) -> None:
        """Raises TooMuchError, OSError."""
        self._written += len(chunk)
        _check_bytes(self._written)
        self._file.write(chunk)


def unpack(packed: Path, name: str, folder: Path) -> Path:
    """The folder ``name`` of a tar archive, below the new ``folder`` and on the disk.

    Raises:
        DamagedError: it is no archive, or has no such folder.
        TooMuchError: it holds more than is taken.
        OSError: the disk does not take it.
    """
    try:
        # Never a compressed one, of which a few bytes can be any size.
        with tarfile.open(packed, mode="r:") as tar:
            tar.extractall(folder, members=_within_limits(tar), filter=_no_links)
    except (tarfile.TarError, ValueError) as error:  # ValueError: a name with a zero byte
        raise DamagedError(str(error)) from error
    found = folder / name
    if not found.is_dir():
        raise DamagedError("it is not in it")
    durable.flush_tree(found)
    return found


def place(found: Path, target: Path) -> None:
    """Move what ``unpack`` gave to ``target``, in place of what may be there, and flush that. Raises OSError."""
    if target.exists():
        shutil.rmtree(target)
    os.replace(found, target)
    durable.flush(target.parent)


def _within_limits(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Its members, as long as they are within the limits. A sparse file is larger than its part of the archive."""
    size = 0
    for number, member in enumerate(tar, start=1):
        size += member.size
        _check_bytes(size)
        if number > MOST_FILES:
            raise TooMuchError(f"more than {MOST_FILES:,} files")
        yield member


def _check_bytes(size: int) -> None:
    if size > MOST_BYTES:
        raise TooMuchError(f"more than {MOST_BYTES / (1 << 30):.3g} GiB")


def _no_links(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Nothing from there leaves the folder, and no device or owner is made here. Nor is a link: one that stays within
    the folder while it is unpacked leads out of it once the run has been moved to its place. No run has any."""
    return None if member.issym() or member.islnk() else tarfile.data_filter(member, folder)
