"""A folder that survives its process: what it is about, and an append-only list of entries, each on disk before the
next step begins."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from cudadent42.base.append import AppendOnlyFile, whole_lines
from cudadent42.base.errors import UnwritableError, UsageError
from cudadent42.base.files import read_record, write_json
from cudadent42.base.folders import is_locked
from cudadent42.base.reading import read_bytes
from cudadent42.base.serialise import encode, line_of, loads

SetupT = TypeVar("SetupT")
EntryT = TypeVar("EntryT")

LOCK = ".lock"


@dataclass(frozen=True)
class Files:
    """How the two files of a journal are called, and what distinguishes its setups."""

    setup: str
    entries: str
    differs: str
    """What may differ between two setups, in words: ``commits, gates or options``."""


class Journal(Generic[SetupT, EntryT]):
    """A context manager; one process at a time."""

    def __init__(
        self,
        folder: Path,
        files: Files,
        setup: SetupT,
        setup_kind: type[SetupT],
        entry_kind: type[EntryT],
        *,
        keeps: bool = True,
    ) -> None:
        """Opens the folder, or makes it. Raises UsageError where it is about something else than ``setup``, of a newer
        version, or in use.

        Args:
            keeps: whether ``entries`` has those too that are added; a large journal's are the caller's to remember.
        """
        self._folder = folder
        self._path = folder / files.entries
        newest: Any = getattr(setup, "schema_version", 1)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Neither a link nor a pipe, as a folder that was brought from elsewhere may have in its place.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(folder / LOCK, flags, 0o666)
        except OSError as error:
            raise UsageError(
                f"cannot write to {folder}: {error.strerror}; choose another with --output-dir"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise UsageError(
                f"{folder} is in use by another process; wait for it or choose another folder"
            ) from error
        recorded = read_record(setup_kind, folder / files.setup, newest)
        if recorded is None:
            # A process that was killed while it wrote the first file leaves half of that under another name.
            if any(
                path.name != LOCK and not path.name.startswith(f".{files.setup}.")
                for path in folder.iterdir()
            ):
                raise UsageError(
                    f"{folder} is not empty and holds something else; choose another with --output-dir"
                )
            write_json(folder / files.setup, setup)
        elif encode(recorded) != encode(setup):
            raise UsageError(
                f"{folder} is about other {files.differs}; repeat those to go on with it, "
                "or choose another with --output-dir"
            )
        self._entries = read_entries(self._path, entry_kind)
        try:
            self._file = AppendOnlyFile(self._path, create=True)
        except OSError as error:
            raise UsageError(f"{self._path} cannot be written: {error.strerror}") from error
        self._keeps = keeps

    def __enter__(self) -> Journal[SetupT, EntryT]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        os.close(self._lock)

    @property
    def entries(self) -> tuple[EntryT, ...]:
        return tuple(self._entries)

    def append(self, entry: EntryT) -> None:
        """Adds an entry, which is on disk when this returns. Raises UnwritableError, with the list as it was, where
        that fails."""
        self.extend((entry,))

    def extend(self, entries: Sequence[EntryT]) -> None:
        """``append`` of all, in one write: a kill leaves the first some."""
        if not entries:
            return
        try:
            self._file.append("\n".join(map(line_of, entries)))
        except OSError as error:
            raise UnwritableError(
                f"cannot write to {self._folder}: {error.strerror}; free some space"
            ) from error
        if self._keeps:
            self._entries.extend(entries)


def in_use(folder: Path) -> bool:
    """Whether a process has the folder's journal open, as far as this machine can tell."""
    return is_locked(folder / LOCK)


def read_entries(path: Path, kind: type[EntryT]) -> list[EntryT]:
    """The entries on disk, without a torn last line; none where there is no file. Raises UsageError."""
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    try:
        lines = whole_lines(data).decode("utf-8").split("\n")
        return [loads(kind, line) for line in lines if line]
    except (ValueError, json.JSONDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
