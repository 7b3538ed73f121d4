"""A session folder as rows of the ledger, read from its log alone.

Of ``events.jsonl`` this needs the first event (who, what, by which protocol), the passing of checkpoints and the end.
Time is counted as the session itself does: by the clock that cannot jump, while the machine was on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudadent42.base.append import whole_lines
from cudadent42.base.errors import NewerVersionError, UsageError
from cudadent42.base.reading import parse_json, read_bytes
from cudadent42.ledger.reading import ID_DIGITS, Row, is_time, path_text
from cudadent42.runs.sessions import EVENTS

SCHEMA_VERSION = 1
"""Of session folders, that this reader knows."""

_OPEN = "open"
_PASSED = "passed"
_S_PER_MINUTE = 60.0


@dataclass(frozen=True)
class SessionRows:
    """One session; the rows of its checkpoints lack the column ``session``."""

    session: Row
    checkpoints: tuple[Row, ...]


def read_session(folder: Path) -> SessionRows:
    """The rows of a session folder, ended or not. Raises UsageError where it cannot be understood."""
    path = folder / EVENTS
    entries = _entries(path)
    try:
        return _rows(folder, entries)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"{path} is not the log of a session: {type(error).__name__}: {error}") from error


def _entries(path: Path) -> list[dict[str, Any]]:
    """All events; what follows the last line's end was being written when the session was killed."""
    try:
        text = whole_lines(read_bytes(path)).decode("utf-8", errors="replace")
        entries = [parse_json(line) for line in text.splitlines()]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{path} holds no event; expected the log of a session")
    started = entries[0].get("data")
    version = started.get("schema_version") if isinstance(started, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise NewerVersionError(
            f"{path} was written by a newer cudadent42 (schema {version}; this one reads up to {SCHEMA_VERSION}): "
            "upgrade it"
        )
    return entries


def _rows(folder: Path, entries: list[dict[str, Any]]) -> SessionRows:
    ended = next((number for number, entry in enumerate(entries) if entry["event"] == "Ended"), None)
    if ended is not None:  # the meter stops there; notes may be added long after
        entries = entries[: ended + 1]
    first, last = entries[0], entries[-1]
    started = first["data"]
    plan = started["protocol"]["checkpoints"]
    seconds = [0.0] * len(plan)
    position, total = 0, 0.0
    passed: set[int] = set()
    for earlier, later in itertools.pairwise(entries):
        took = _between(earlier, later)
        total += took
        if plan:  # after the last checkpoint the meter runs until the session ends, and it is that one's
            seconds[min(position, len(plan) - 1)] += took
        if later["event"] == "Passed":
            passed.add(position)
            position += 1
    if not is_time(first["time"]):
        raise ValueError(f"its first event is of {first['time']!r}")
    # The first event is the same in every copy, and has the machine's name and time in it.
    identity = hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:ID_DIGITS]
    session: Row = {
        "id": identity,
        "path": path_text(folder),
        "name": folder.name,
        "status": _OPEN if ended is None else str(last["data"]["end"]),
        "started": first["time"],
        "ended": None if ended is None else last["time"],
        "seconds": total,
        "rate": str(started["settings"]["rate"]),
    }
    checkpoints = tuple(
        {
            "position": number,
            "name": str(checkpoint["name"]),
            "planned_minutes": float(checkpoint["minutes"]),
            "minutes": seconds[number] / _S_PER_MINUTE,
            "outcome": _PASSED if number in passed else _OPEN,
        }
        for number, checkpoint in enumerate(plan)
    )
    return SessionRows(session, checkpoints)


def _between(earlier: dict[str, Any], later: dict[str, Any]) -> float:
    """Seconds that the machine was on for; 0 across a restart, when the meter stood still."""
    same = (earlier["host"], earlier["boot"]) == (later["host"], later["boot"])
    return max(0.0, float(later["uptime_s"]) - float(earlier["uptime_s"])) if same else 0.0
