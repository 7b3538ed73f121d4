"""The journal of machine starts: what was asked of a provider, before it answers.

A rented machine costs money from its start, whether or not a run ever begins on it, so starts are on record before they
happen. The journal is append-only text in the user's state folder (a JSON line each, flushed to disk), because the
ledger is only derived: a start that stood in the database alone would be lost with it.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any

from cudadent42.base.append import append_lines
from cudadent42.base.errors import UsageError
from cudadent42.base.folders import make_private, state_folder
from cudadent42.base.reading import parse_json, read_text

SCHEMA_VERSION = 1
FILE = "machine-starts.jsonl"


class StartOutcome(str, Enum):
    """How far a start has come. The first two go on costing money."""

    REQUESTED = "requested"
    READY = "ready"
    FAILED = "failed"
    """It never became usable."""
    STOPPED = "stopped"
    LOST = "lost"
    """It was taken away, or does not answer any more."""
    DELETED = "deleted"
    """A machine that was made for a run is gone, disk and all; STOPPED, its disk would still cost something."""


@dataclass(frozen=True)
class MachineStart:
    """One start of a machine. Times are UTC, ISO 8601."""

    id: str
    machine: str
    """The provider's name for the instance."""
    rate: str
    """Its entry in the table of rates."""
    session: str | None
    requested: str
    ready: str | None = None
    ended: str | None = None
    outcome: StartOutcome = StartOutcome.REQUESTED
    reason: str = ""
    provider_start: str = ""
    """What the provider calls this start, which tells it from every other; empty where it was not asked."""


def journal() -> Path:
    return state_folder() / FILE


def request(machine: str, rate: str, session: str | None = None) -> str:
    """Put on record that ``machine`` is about to be started; the start's identity, for `mark`.

    Raises UsageError where it cannot be written: do not start what is not on record.
    """
    identity = uuid.uuid4().hex
    _append(
        {
            "schema_version": SCHEMA_VERSION,
            "id": identity,
            "time": _now(),
            "outcome": StartOutcome.REQUESTED.value,
            "machine": machine,
            "rate": rate,
            "session": session,
        }
    )
    return identity


def mark(
    identity: str,
    outcome: StartOutcome,
    reason: str = "",
    moment: datetime | None = None,
    provider_start: str = "",
) -> None:
    """Put on record how a start went on, now or at the ``moment`` that is known of it (with its time zone).

    Raises UsageError where it cannot be written.
    """
    time = _now() if moment is None else _iso(moment)
    entry: dict[str, object] = {"id": identity, "time": time, "outcome": outcome.value, "reason": reason}
    _append({**entry, "provider_start": provider_start} if provider_start else entry)


def load(path: Path | None = None) -> tuple[MachineStart, ...]:
    """All starts on record, in the order of their requests. A line that was cut short by a crash is left out.

    Raises UsageError for a journal of a newer version, or one that cannot be read.
    """
    path = journal() if path is None else path
    try:
        text = read_text(path, errors="replace")
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    starts: dict[str, MachineStart] = {}
    for line in text.splitlines():
        entry = _entry(line)
        if entry is None:
            continue
        version = entry.get("schema_version", SCHEMA_VERSION)
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise UsageError(
                f"{path} was written by a newer cudadent42 (schema {version}; this one knows {SCHEMA_VERSION}): "
                "upgrade it"
            )
        identity, time, outcome = entry["id"], entry["time"], StartOutcome(entry["outcome"])
        if outcome is StartOutcome.REQUESTED:
            session = entry.get("session")
            starts[identity] = MachineStart(
                id=identity,
                machine=str(entry.get("machine", "")),
                rate=str(entry.get("rate", "")),
                session=None if session is None else str(session),
                requested=time,
            )
        elif identity in starts:
            start = starts[identity]
            called = str(entry.get("provider_start", start.provider_start))
            marked = _marked(start, outcome, time, str(entry.get("reason", "")))
            starts[identity] = replace(marked, provider_start=called)
    return tuple(starts.values())


def _marked(start: MachineStart, outcome: StartOutcome, time: str, reason: str) -> MachineStart:
    if outcome is StartOutcome.READY:
        # Also after it was taken for lost: what is ready costs money.
        return replace(start, outcome=outcome, ready=start.ready or time, ended=None, reason=reason)
    return replace(start, outcome=outcome, ended=start.ended or time, reason=reason)


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    words = {outcome.value for outcome in StartOutcome}
    whole = isinstance(entry.get("id"), str) and _is_time(entry.get("time"))
    return entry if whole and entry.get("outcome") in words else None


def _is_time(text: object) -> bool:
    try:
        return isinstance(text, str) and datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _append(entry: dict[str, object]) -> None:
    path = journal()
    try:
        make_private(path.parent)
        append_lines(path, (json.dumps(entry),))
    except OSError as error:
        raise UsageError(
            f"cannot put the machine's start on record in {path}: {error.strerror}; free some space, then try again"
        ) from error


def _now() -> str:
    return _iso(datetime.now(timezone.utc))


def _iso(moment: datetime) -> str:
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds")
