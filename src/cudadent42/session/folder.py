"""Session folders: where they are, making one, opening one.

    sessions/<UTC time>-<name>/
        protocol.toml   gates/<checkpoint>.toml   events.jsonl
        base.diff   source.bundle   attempts/<number>.diff
        runs/<number>-<checkpoint>/   report.md   report.html

A folder is whole in itself: copied to another machine, the session goes on there.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cudadent42.base import durable
from cudadent42.base.errors import UsageError
from cudadent42.runs.sessions import EVENTS, is_session
from cudadent42.session import log, tree
from cudadent42.session.clock import Clock, Instant
from cudadent42.session.events import Entry, Started
from cudadent42.session.state import State, replay

SESSIONS = "sessions"
PROTOCOL = "protocol.toml"
GATES = "gates"
RUNS = "runs"
ATTEMPTS = "attempts"
BASE = "base.diff"
SOURCE = "source.bundle"
"""The source at the start, for machines that have no clone of it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HIDE = "*\n"
"""A ``.gitignore`` that keeps sessions out of the very source that they change."""


@dataclass(frozen=True)
class Session:
    """A session as read from its folder."""

    path: Path
    entries: tuple[Entry, ...]
    state: State

    @property
    def name(self) -> str:
        return self.path.name

    def gates_of(self, checkpoint: str) -> Path | None:
        """The gate file of a checkpoint; None where it has none."""
        path = self.path / GATES / f"{checkpoint}.toml"
        return path if path.is_file() else None


def project(start: Path) -> Path:
    """The folder whose ``sessions/`` is meant: the top of the git repository, else ``start`` itself."""
    work_tree = tree.find(start)
    return work_tree.root if work_tree else start.absolute()


def sessions_folder(start: Path) -> Path:
    return project(start) / SESSIONS


def load(path: Path) -> Session:
    """Read a session folder. Raises UsageError where it is none, is damaged, or is newer."""
    if not is_session(path):
        raise UsageError(
            f"{path} has no {EVENTS}; expected a session folder, as `cudadent42 session start` makes"
        )
    entries = log.read(path / EVENTS)
    return Session(path, entries, replay(entries))


def all_sessions(folder: Path) -> list[Path]:
    """Session folders, the oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and is_session(path))


def find(folder: Path, wanted: str | None) -> Session:
    """The session of that name or path; None: the one that is open, or the last."""
    if wanted is not None:
        path = Path(wanted).absolute()
        return load(path if "/" in wanted or path.is_dir() else folder / wanted)
    sessions = all_sessions(folder)
    if not sessions:
        raise UsageError(f"there is no session in {folder}; begin one with `cudadent42 session start`")
    return open_session(folder) or load(sessions[-1])


def open_session(folder: Path) -> Session | None:
    """The session that has not ended, if there is one. One that cannot be read does not stand in the way of others."""
    for path in reversed(all_sessions(folder)):
        with suppress(UsageError):
            session = load(path)
            if session.state.end is None:
                return session
    return None


def create(folder: Path, name: str, started: Started, files: Mapping[str, bytes], clock: Clock) -> Session:
    """Make a session folder. It appears whole or not at all."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"the session's name {name!r}: expected letters, digits, dots, dashes and underscores, 64 at most"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        hide(folder)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
        try:
            for relative, content in files.items():
                _write(temporary / relative, content)
            _write(temporary / EVENTS, log.first(started, clock))
            os.chmod(temporary, 0o755)
            path = _place(temporary, folder, f"{_stamp(clock())}-{name}")
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        durable.flush(folder)
    except OSError as error:
        raise UsageError(
            f"cannot make a session in {folder}: {error.strerror}; free some space or check its owner"
        ) from error
    return load(path)


def next_run(session: Session, checkpoint: str) -> str:
    """A new run folder's path, relative to the session's."""
    runs = session.path / RUNS
    taken = {path.name.partition("-")[0] for path in runs.iterdir()} if runs.is_dir() else set()
    taken |= {
        Path(run.run).name.partition("-")[0] for run in session.state.runs
    }  # its folder may not have been made
    number = next(n for n in itertools.count(1) if f"{n:02d}" not in taken)
    return f"{RUNS}/{number:02d}-{checkpoint}"


def write_file(path: Path, content: bytes) -> None:
    """Put a file in place, whole and on the disk. Raises UsageError where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        _write(temporary, content)
        os.replace(temporary, path)
        durable.flush(path.parent)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}; free some space or check its owner"
        ) from error


def attempt_file(session: Path, number: int) -> Path:
    """The diff of an attempt against its parent."""
    return session / ATTEMPTS / f"{number}.diff"


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        rest = content
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _place(temporary: Path, folder: Path, name: str) -> Path:
    for number in itertools.count(1):
        path = folder / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            break
    os.rename(temporary, path)
    return path


def hide(folder: Path) -> None:
    """Keep sessions out of what git sees."""
    ignore = folder / ".gitignore"
    if not ignore.exists():
        write_file(ignore, _HIDE.encode())


def _stamp(instant: Instant) -> str:
    return re.sub(r"[-:]|\..*", "", instant.time) + "Z"
