"""Trees of files by their content: one digest over the names and contents of all files below a folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from cudadent42.base.paths import is_bytecode
from cudadent42.base.reading import read_bytes

MOST_BYTES = 1 << 30
"""Of one tree. More is data, not source."""


class TreeDigest:
    """SHA-256 over the names and contents of files, which come in the order of their names."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def add(self, path: str, content: bytes) -> None:
        """``path``: relative, with slashes."""
        for part in (os.fsencode(path), content):
            self._sha256.update(len(part).to_bytes(8, "big") + part)

    def hexadecimal(self) -> str:
        return self._sha256.hexdigest()


def digest_of(files: Mapping[str, bytes]) -> str:
    """Of files by path."""
    digest = TreeDigest()
    for path in sorted(files):
        digest.add(path, files[path])
    return digest.hexadecimal()


def is_file(path: Path) -> bool:
    """A regular one, and no link to one."""
    return path.is_file() and not path.is_symlink()


def holds(folder: Path, digest: str) -> bool:
    """Whether the files below a folder are the ones that the digest is of. Bytecode beside them is never read."""
    actual = TreeDigest()
    try:
        paths = {
            path.relative_to(folder).as_posix(): path
            for path in folder.rglob("*")
            if not is_bytecode(path.relative_to(folder)) and not (path.is_dir() and not path.is_symlink())
        }
        if not all(is_file(path) for path in paths.values()):
            return False
        for name in sorted(paths):
            actual.add(name, read_bytes(paths[name], MOST_BYTES))
    except OSError:
        return False
    return actual.hexadecimal() == digest
