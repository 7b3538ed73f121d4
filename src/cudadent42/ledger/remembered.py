"""Which folders the ledger has been told of, outside of the database: a damaged or lost ledger is made from them.

Append-only text beside the ledger's file, or in the user's state folder for a database on a server: a JSON line for
each folder. Needs no database package.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from cudadent42.base.append import append_lines
from cudadent42.base.errors import UsageError
from cudadent42.base.folders import make_private, state_folder
from cudadent42.base.reading import parse_json

_SUFFIX = ".folders"
_DIGITS = 16


def host() -> str:
    """The name of this machine, by which paths in the ledger are meant."""
    return platform.node() or "unknown"


def file_of(location: Path | str) -> Path:
    """Where the list of a ledger is. Raises UsageError for a URL that cannot be read."""
    if isinstance(location, Path):
        return location.with_name(location.name + _SUFFIX)
    try:
        url = urlsplit(location)
    except ValueError as error:  # whose words repeat a part of it
        raise UsageError("the ledger's URL cannot be read") from error
    # Without the password: the list stays when that is changed.
    identity = f"{url.scheme}://{url.username}@{url.hostname}:{_port(location)}{url.path}"
    return state_folder() / f"ledger-{hashlib.sha256(identity.encode()).hexdigest()[:_DIGITS]}{_SUFFIX}"


def remember(location: Path | str, folders: Iterable[Path]) -> None:
    """Put folders on the list that are not there. Raises UsageError where it cannot be written."""
    remembered = set(recall(location))
    new = [path for path in dict.fromkeys(folder.absolute() for folder in folders) if path not in remembered]
    if not new:
        return
    lines = [json.dumps({"host": host(), "path": str(path)}) for path in new]
    path = file_of(location)
    try:
        if not path.parent.exists():
            make_private(path.parent)
        append_lines(path, lines)
    except OSError as error:
        raise UsageError(f"cannot write to {path}: {error.strerror}; free some space") from error


def recall(location: Path | str) -> tuple[Path, ...]:
    """The folders of this machine on the list, whether or not they are still there. A torn line is left out."""
    try:
        text = file_of(location).read_text(encoding="utf-8", errors="replace")
    except OSError:  # none yet; or nothing that can be recalled, and the database has its own
        return ()
    folders: dict[Path, None] = {}
    for line in text.splitlines():
        try:
            entry = parse_json(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("host") == host() and isinstance(entry.get("path"), str):
            folders[Path(entry["path"])] = None
    return tuple(folders)


def _port(location: str) -> str:
    try:
        return str(urlsplit(location).port or "")
    except ValueError:  # not a number; that is the database's to say
        return ""
