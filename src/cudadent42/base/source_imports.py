"""Modules of files that were sent to this machine, from their source alone.

Their digest is over sources. Bytecode beside them is no part of it, and Python would take it for them where it names
their time and size: who is loaded first could leave some for who is raced next.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import PathEntryFinder
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path
from types import CodeType


class SourceLoader(SourceFileLoader):
    """Reads no bytecode, and leaves none."""

    def get_code(self, fullname: str) -> CodeType:
        """Of the source as it is now."""
        return self.source_to_code(self.get_data(self.path), self.path)


def make_importable(folder: Path) -> None:
    """From now on imports find the modules below ``folder``, after those of all other folders."""
    root = str(folder)
    if root in sys.path:
        return
    finder_of = FileFinder.path_hook((SourceLoader, SOURCE_SUFFIXES))

    def below(path: str) -> PathEntryFinder:
        if path != root and not path.startswith(root + os.sep):
            raise ImportError(f"{path} is not below {root}", path=path)
        return finder_of(path)

    sys.path_hooks.insert(0, below)
    sys.path_importer_cache.pop(root, None)
    sys.path.append(root)
