"""How often each lesson has fired on this user's machine: one small file in the user's state folder.

A lock held with flock(2) makes writers wait for each other, and the file is replaced by rename, so that a reader sees
the old counts or the new ones. The system lets go of the lock when a process dies.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from cudadent42.base.errors import NewerVersionError, UsageError
from cudadent42.base.files import write_json
from cudadent42.base.folders import locked, make_private, state_folder
from cudadent42.base.reading import read_json
from cudadent42.base.serialise import decode

SCHEMA_VERSION = 1
_FILE = "firings.json"
_LOCK = "firings.lock"
_DAMAGED = "firings.damaged.json"


@dataclass(frozen=True)
class Firing:
    count: int
    first: str
    """UTC, ISO 8601."""
    last: str


@dataclass(frozen=True)
class Firings:
    schema_version: int = SCHEMA_VERSION
    lessons: dict[str, Firing] = field(default_factory=dict)


def read(folder: Path | None = None) -> Firings:
    """The counts; none where there is no file. Raises UsageError where it is damaged or newer."""
    path = (folder or state_folder()) / _FILE
    try:
        document = read_json(path)
    except FileNotFoundError:
        return Firings()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}); remove it to count from zero") from error
    schema = document.get("schema_version") if isinstance(document, dict) else None
    if type(schema) is int and schema > SCHEMA_VERSION:
        raise NewerVersionError(
            f"{path} was written by a newer cudadent42 (schema {schema}); upgrade this one"
        )
    try:
        return decode(Firings, document)
    except ValueError as error:
        raise UsageError(f"{path} cannot be read ({error}); remove it to count from zero") from error


def record(ids: Iterable[str], folder: Path | None = None) -> None:
    """Count one firing of each lesson. Raises UsageError where that cannot be written.

    A damaged file is set aside and counting begins anew: the counts are of use, but nothing depends on them.
    """
    folder = make_private(folder or state_folder())
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with locked(folder / _LOCK):
        try:
            lessons = dict(read(folder).lessons)
        except NewerVersionError:
            raise
        except UsageError:
            os.replace(folder / _FILE, folder / _DAMAGED)
            lessons = {}
        for name in ids:
            old = lessons.get(name, Firing(0, now, now))
            lessons[name] = replace(old, count=old.count + 1, last=now)
        write_json(folder / _FILE, Firings(lessons=lessons))
