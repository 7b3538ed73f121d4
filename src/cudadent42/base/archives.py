"""Archives from elsewhere, unpacked: files and folders alone, below one new folder, within limits.

Not ``TarFile.extractall``: its ``filter`` is missing in Python 3.10.0 to 3.10.11 and 3.11.0 to 3.11.3, and it has no
limits. Names, sizes and headers are taken for what they are, bytes of a stranger.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cudadent42.base.errors import LabError

_HEADER_BYTES = 1 << 20
"""Read for one member besides its content. A name has up to 4 KiB; a sparse file's map of more is not ours."""
_CHUNK_BYTES = 1 << 20
_EXECUTABLE = 0o100
_LONGEST_NAME = 255
"""Bytes of one part of a path, on the file systems that there are."""


class DamagedError(LabError):
    """It is not the archive that was asked for."""


class TooMuchError(LabError):
    """It is more than is taken."""


@dataclass(frozen=True)
class Limits:
    """What one archive may unpack to."""

    most_bytes: int
    """Of all files, holes of sparse ones included: a program that copies such a file fills them."""
    most_files: int
    """Folders included. Each costs an inode and a flush."""
    most_levels: int = 32
    """Of folders in folders."""

    def check_bytes(self, size: int) -> None:
        """Raises TooMuchError."""
        if size > self.most_bytes:
            raise TooMuchError(f"more than {self.most_bytes / (1 << 30):.3g} GiB")


def unpack(packed: Path, folder: Path, limits: Limits) -> None:
    """Unpack a tar archive, not a compressed one, below the new ``folder``.

    Links, devices and the like are left out; owners and times are not kept, of modes only whether a file may be
    executed.

    Raises:
        DamagedError: it is no such archive, or names something outside of the folder.
        TooMuchError: it holds more than is taken.
        OSError: the disk does not take it.
    """
    folder.mkdir()
    try:
        with _Bounded(io.FileIO(packed)) as source, tarfile.open(fileobj=source, mode="r:") as tar:
            for member, path in _members(tar, source, folder, limits):
                _write(tar, source, member, path)
    # Beside tarfile's own: numbers out of range, names with a zero byte, headers of headers without end.
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, MemoryError, EOFError) as error:
        raise DamagedError(str(error) or type(error).__name__) from error


class _Bounded(io.BufferedReader):
    """A file of which one read never takes much memory, nor one header."""

    _left = _HEADER_BYTES

    def begin_member(self) -> None:
        self._left = _HEADER_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _CHUNK_BYTES:
            raise tarfile.ReadError(f"a header of {size or -1:,} bytes")
        self._left -= size
        if self._left < 0:
            raise tarfile.ReadError(f"a header of more than {_HEADER_BYTES:,} bytes")
        return super().read(size)


def _members(
    tar: tarfile.TarFile, source: _Bounded, folder: Path, limits: Limits
) -> Iterator[tuple[tarfile.TarInfo, Path]]:
    """Its files and folders and where they belong, as long as they are within the limits."""
    size = number = 0
    while True:
        source.begin_member()
        member = tar.next()
        if member is None:
            return
        number += 1
        if number > limits.most_files:
            raise TooMuchError(f"more than {limits.most_files:,} files")
        if member.size < 0:
            raise tarfile.ReadError(f"a file of {member.size} bytes")
        size += member.size
        limits.check_bytes(size)
        if member.isdir() or (member.isreg() and not member.issparse()):
            yield member, folder.joinpath(*_parts(member.name, limits))


def _parts(name: str, limits: Limits) -> tuple[str, ...]:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise tarfile.ReadError(f"a file named {name[:80]!r}, outside of the folder")
    if len(path.parts) > limits.most_levels:
        raise TooMuchError(f"folders more than {limits.most_levels} levels deep")
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
        raise tarfile.ReadError(f"a name longer than {_LONGEST_NAME} bytes")
    return path.parts


def _write(tar: tarfile.TarFile, source: _Bounded, member: tarfile.TarInfo, path: Path) -> None:
    """Nothing here is a link, so none is followed: all below the folder was made by this."""
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    assert content is not None  # it is a regular file
    mode = 0o755 if member.mode & _EXECUTABLE else 0o644
    path.unlink(missing_ok=True)  # a name that comes twice counts as it does to tar
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        left = member.size
        while left > 0:
            source.begin_member()
            chunk = content.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise tarfile.ReadError("its end is missing")
            file.write(chunk)
            left -= len(chunk)
