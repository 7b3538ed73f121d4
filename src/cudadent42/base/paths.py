"""Where a path leads, and what Python writes by itself beside modules."""

from __future__ import annotations

import os
from pathlib import Path, PurePath


def real_path(path: Path) -> Path:
    """Absolute and without links, as ``Path.resolve``, which below Python 3.13 raises RuntimeError for links in a loop.

    Such a path stays as it is: who opens it gets the OSError of a file that cannot be opened.
    """
    return Path(os.path.realpath(path))


def is_bytecode(path: PurePath) -> bool:
    """Whether it lies in a cache of bytecode: no source of anything, whether git ignores it or not."""
    return "__pycache__" in path.parts
