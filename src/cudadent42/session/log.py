"""``events.jsonl``: appended to, flushed to the disk event by event, never rewritten.

A torn last line is left out (`base.append`). Anything else that cannot be read is damage, and said to be.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from cudadent42.base.append import AppendOnlyFile, whole_lines
from cudadent42.base.errors import NewerVersionError, UsageError
from cudadent42.base.reading import parse_json, read_bytes
from cudadent42.session.clock import Clock
from cudadent42.session.events import SCHEMA_VERSION, Entry, Event, Started, from_line, to_line


def read(path: Path) -> tuple[Entry, ...]:
    """The events of a log, without a torn last line. Raises UsageError where it is missing, damaged or newer."""
    try:
        data = read_bytes(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; expected the log of a session") from error
    return parse(data, path)


def parse(data: bytes, path: Path) -> tuple[Entry, ...]:
    """``read`` of bytes."""
    entries = []
    for number, line in enumerate(whole_lines(data).splitlines()):
        text = line.decode("utf-8", errors="replace")
        if number == 0:
            _check_schema(text, path)
        try:
            entry = from_line(text)
        except (ValueError, RecursionError) as error:
            raise _damaged(path, number, str(error)) from error
        if entry.number != number:
            raise _damaged(path, number, f"it says that it is event {entry.number}")
        if isinstance(entry.event, Started) != (number == 0):
            raise _damaged(path, number, "a session starts with its first event, and only there")
        entries.append(entry)
    if not entries:
        raise UsageError(f"{path} holds no event; the session was not started, remove its folder")
    return tuple(entries)


class EventLog:
    """The log, open for appending.

    No `base.journal`: that has a file of its setup beside its entries and a lock for itself. A session's setup is its
    first event, its lock is that of all sessions of a project, and events are numbered. Both write by `base.append`.
    """

    def __init__(self, path: Path, entries: Iterable[Entry], clock: Clock) -> None:
        """``entries`` is what `read` found. Cuts off a torn last line."""
        self.path = path
        self._first = len(tuple(entries))
        self._clock = clock
        try:
            self._file = AppendOnlyFile(path)
        except OSError as error:
            raise _unwritable(path, error) from error

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, event: Event) -> Entry:
        """Write the event and wait until it is on the disk.

        Raises UsageError, with the log as it was, where that fails. An interrupt leaves it as it was too: what is
        recorded next, such as the end of the work that was interrupted, would else bear the same number.
        """
        entry = Entry(self._first + self._file.appended, self._clock(), event)
        try:
            self._file.append(to_line(entry))
        except OSError as error:
            raise _unwritable(self.path, error) from error
        return entry


def first(event: Started, clock: Clock) -> bytes:
    """The content of a new log."""
    return (to_line(Entry(0, clock(), event)) + "\n").encode()


def _check_schema(line: str, path: Path) -> None:
    """A newer version may have other events: say so before stumbling over one."""
    try:
        schema = parse_json(line)["data"]["schema_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, 0, "it is not the start of a session") from error
    if type(schema) is int and schema > SCHEMA_VERSION:
        raise NewerVersionError(
            f"{path.parent} was written by a newer cudadent42 (schema {schema}); "
            f"this one reads up to {SCHEMA_VERSION}: upgrade it"
        )


def _damaged(path: Path, number: int, reason: str) -> UsageError:
    return UsageError(
        f"{path}, line {number + 1} is damaged: {reason}. The run folders beside it are whole; "
        "bring back the log from a copy, or start a new session"
    )


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write to {path}: {error.strerror}; what was measured is kept in {path.parent}. "
        "Free some space or mend the disk, then run the same command again"
    )
