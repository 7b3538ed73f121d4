"""Starting points for a kernel of one's own: files that verify and race as they are."""

from __future__ import annotations

import re
from enum import Enum
from importlib import resources
from pathlib import Path

from cudadent42.base.errors import UsageError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,47}")
_COMMON = "common"


class Kind(str, Enum):
    """What a kernel is written in."""

    PYTHON = "python"
    CPU = "cpu"
    """C++ with the C ABI."""
    CUDA = "cuda"


def create(name: str, kind: Kind, parent: Path) -> tuple[Path, ...]:
    """Write the files of a new kernel into the folder ``parent/name``, which must be new or empty.

    Returns their paths. Raises UsageError for a name that is no name, or a folder that cannot be used.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for a kernel; expected a letter, then letters, digits, dashes and underscores, "
            "48 at most"
        )
    folder = parent / name
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"the folder {folder} is not empty; choose another name or another --output-dir")
        folder.mkdir(parents=True, exist_ok=True)
        return tuple(path for part in (kind.value, _COMMON) for path in _write(part, name, folder))
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}; choose another --output-dir"
        ) from error


def _write(part: str, name: str, folder: Path) -> list[Path]:
    source = resources.files("cudadent42.scaffold") / "files" / part
    written = []
    for entry in sorted(source.iterdir(), key=lambda entry: entry.name):
        path = folder / _filled(entry.name, name)
        path.write_text(_filled(entry.read_text(encoding="utf-8"), name), encoding="utf-8")
        written.append(path)
    return written


def _filled(text: str, name: str) -> str:
    """With the kernel's name in its places; C knows no dashes."""
    return text.replace("@NAME@", name).replace("@FUNCTION@", name.replace("-", "_"))
