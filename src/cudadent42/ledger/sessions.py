"""A session folder as rows of the ledger."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cudadent42.errors import UsageError
from cudadent42.ledger.reading import Row, seconds_between

PROTOCOL = "protocol.toml"
EVENTS = "events.jsonl"


@dataclass(frozen=True)
class SessionRows:
    """One session; the rows of its checkpoints lack the column ``session``."""

    session: Row
    checkpoints: tuple[Row, ...]


def is_session(folder: Path) -> bool:
    return (folder / PROTOCOL).is_file() and (folder / EVENTS).is_file()


def session_of(folder: Path) -> Path | None:
    """The session that a run folder lies in: ``sessions/<session>/runs/<run>``."""
    owner = folder.absolute().parent.parent
    return owner if is_session(owner) else None


def read_session(folder: Path) -> SessionRows:
    """The rows of a session folder, ended or not. Raises UsageError where it cannot be understood."""
    times = []
    try:
        lines = (folder / EVENTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"{folder / EVENTS} cannot be read: {error.strerror}") from error
    for line in lines:
        try:
            times.append(str(json.loads(line)["time"]))
        except (ValueError, KeyError, TypeError):
            continue  # the line that was being written when the session was killed
    if not times:
        raise UsageError(f"{folder / EVENTS} holds no event; expected a session folder")
    session = {
        "id": folder.name,
        "path": str(folder.absolute()),
        "name": folder.name,
        "status": "",
        "started": times[0],
        "ended": times[-1],
        "seconds": seconds_between(times[0], times[-1]),
        "rate": "local",
    }
    return SessionRows(session, ())
