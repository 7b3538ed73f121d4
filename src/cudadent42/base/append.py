"""A file of lines that is only appended to, each line on the disk before the next step begins.

`AppendOnlyFile` is for one process at a time, `append_lines` for several at once.

A process can be killed within a write, so that the last line is torn. A reader leaves it out (`whole_lines`); the next
writer cuts it off before it appends. A write that fails or is interrupted is taken back at once, so that nothing but a
kill leaves a torn line.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_STEP = 1 << 16


def whole_lines(data: bytes) -> bytes:
    """Without a torn last line."""
    return data[: data.rfind(b"\n") + 1]


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append to a file of this user's own, to which other processes append too, and wait until it is on the disk.

    Raises OSError. Each line begins behind a line feed of its own: after a line that a crash cut short, it is whole.
    Readers pass over empty lines.
    """
    data = "".join(f"\n{line}\n" for line in lines).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError(None, "the disk is full")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AppendOnlyFile:
    """Open for appending by one process at a time, which the caller sees to."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Cuts off a torn last line. Raises OSError."""
        self.appended = 0
        """Lines, by this process."""
        # A folder that was brought from elsewhere may have a link in its place, to a file of this user's.
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        self._descriptor = os.open(path, flags, 0o666)
        try:
            self._size = _whole_size(self._descriptor)
            if os.fstat(self._descriptor).st_size != self._size:
                os.ftruncate(self._descriptor, self._size)
                os.fsync(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> AppendOnlyFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def append(self, line: str) -> None:
        """Write the line and wait until it is on the disk. Where that fails (OSError) or is interrupted, the file is as
        it was."""
        data = rest = (line + "\n").encode()
        before = (self._size, self.appended)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
            self._size += len(data)
            self.appended += 1
        except BaseException:
            self._size, self.appended = before
            with suppress(OSError):  # else the next writer cuts it off
                os.ftruncate(self._descriptor, self._size)
            raise


def _whole_size(descriptor: int) -> int:
    """Bytes up to and with the last line feed."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _STEP)
        at = os.pread(descriptor, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0
