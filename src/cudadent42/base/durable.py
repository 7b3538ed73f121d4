"""On the disk, not only in memory: for what has to be there before its only other copy is removed."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Put a file's content, or the names in a folder, on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """All below a folder, and the folder itself; files before the names that lead to them. Raises OSError."""
    for path, _, files in os.walk(folder, topdown=False):
        for name in files:
            flush(Path(path) / name)
        flush(Path(path))
