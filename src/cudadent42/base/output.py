"""What a process and the candidates in it print: kept in a file up to a limit, its end always."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

MOST_BYTES = 64 << 20
"""Of one log. A run's has kilobytes; a candidate that prints in its innermost loop makes gigabytes an hour."""
LOOK_S = 1.0
"""Between two looks at a log's length, for who waits for a process."""
_TAIL_BYTES = 1 << 20
_LINE_LENGTH = 300
_FATAL = "Fatal Python error:"
"""From here on faulthandler says where each thread was; what went wrong was said before."""


class OutputLog:
    """The file, for as long as one process lives. ``path`` None: a temporary one."""

    def __init__(self, path: Path | None) -> None:
        self.file = open(path, "ab+") if path else tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        descriptor = self.file.fileno()
        # All who write append, so that the file can be cut while they do.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
        self._start = os.fstat(descriptor).st_size

    def close(self) -> None:
        self.file.close()

    def limit(self) -> None:
        """Cut the middle out of a log that has become too long."""
        descriptor = self.file.fileno()
        size = os.fstat(descriptor).st_size
        if size <= MOST_BYTES:
            return
        kept = MOST_BYTES // 2
        tail = os.pread(descriptor, _TAIL_BYTES, size - _TAIL_BYTES)
        os.ftruncate(descriptor, kept)
        os.write(descriptor, f"\n[{size - kept - len(tail)} bytes left out]\n".encode() + tail)
        self._start = min(self._start, kept)

    def content(self) -> bytes:
        """What is kept."""
        self.limit()
        descriptor = self.file.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)

    def last_line(self) -> str:
        """What was printed last by this process, in short; empty for nothing."""
        descriptor = self.file.fileno()
        size = os.fstat(descriptor).st_size
        start = max(self._start, size - _TAIL_BYTES)
        text = os.pread(descriptor, max(0, size - start), start).decode(errors="replace")
        lines = [line.strip() for line in text.split(_FATAL)[0].splitlines() if line.strip()]
        return lines[-1][:_LINE_LENGTH] if lines else ""
