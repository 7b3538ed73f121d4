"""Where a path leads."""

from __future__ import annotations

import os
from pathlib import Path


def real_path(path: Path) -> Path:
    """Absolute and without links, as ``Path.resolve``, which below Python 3.13 raises RuntimeError for links in a loop.

    Such a path stays as it is: who opens it gets the OSError of a file that cannot be opened.
    """
    return Path(os.path.realpath(path))
