"""What Python writes by itself beside modules."""

from __future__ import annotations

from pathlib import PurePath


def is_bytecode(path: PurePath) -> bool:
    """Whether it lies in a cache of bytecode: no source of anything, whether git ignores it or not."""
    return "__pycache__" in path.parts
