"""One process at a time works on the sessions of a project.

The lock is flock(2) on ``sessions/.lock``: the system lets go of it when its process dies, however it dies. The file
also names the holder (process, host, start of the machine), for the message, and for file systems that know no locks.
There a holder counts as gone when its machine was restarted since or its process no longer exists.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.base.folders import is_locked
from cudadent42.base.reading import read_json
from cudadent42.base.serialise import decode
from cudadent42.session.clock import Instant

LOCK = ".lock"
_ATTEMPTS = 5
_PAUSE_S = 0.1
"""Who only asks who is at work (`holder_of`) holds the lock for a moment: that is no other process at work."""

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class Holder:
    pid: int
    host: str
    boot: str
    since: str
    """UTC, ISO 8601."""
    session: str

    def gone(self, here: Instant) -> bool:
        """Whether the holder certainly no longer runs. On another machine that cannot be told."""
        if self.host != here.host:
            return False
        return self.boot != here.boot or not _exists(self.pid)

    def describe(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@contextmanager
def locked(folder: Path, session: str, here: Instant) -> Iterator[Holder | None]:
    """Hold the lock of the sessions in ``folder``. Yields the holder that a killed process left behind, if any.

    Raises UsageError, saying what to do, where another process works on a session.
    """
    path = folder / LOCK
    try:
        # A repository may hold a link in its place. What it leads to would be written over.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UsageError(
                f"{path} is a symbolic link, and no session makes one; look where it leads, and remove it"
            ) from error
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}; check its owner and the disk"
        ) from error
    try:
        supported = _take(descriptor, path)
        left = _read(path)
        if not supported and left is not None and not left.gone(here):
            raise _busy(left, path)
        holder = Holder(os.getpid(), here.host, here.boot, here.time, session)
        _write(descriptor, json.dumps(asdict(holder)), folder)
        try:
            yield left
        finally:
            with suppress(OSError):  # what is left in the file then only makes for a remark
                os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def holder_of(folder: Path) -> Holder | None:
    """Who works on a session now, as far as this machine can tell; takes no lock."""
    path = folder / LOCK
    return _read(path) if is_locked(path) else None


def _take(descriptor: int, path: Path) -> bool:
    """Take the lock; False where this file system has none."""
    for attempt in range(_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError as error:
            if attempt == _ATTEMPTS - 1:
                raise _busy(_read(path), path) from error
            time.sleep(_PAUSE_S)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise UsageError(
                f"cannot lock {path}: {error.strerror}; put the project on a local disk"
            ) from error
    raise AssertionError("unreachable")


def _busy(holder: Holder | None, path: Path) -> UsageError:
    who = holder.describe() if holder else "another process"
    return UsageError(
        f"a session of this project is being worked on by {who}. Wait until it is done, or end that process; "
        f"if it is certain that none runs, remove {path}"
    )


def _read(path: Path) -> Holder | None:
    """What the file says; None where it is empty or torn."""
    try:
        return decode(Holder, read_json(path))
    except (OSError, ValueError):
        return None


def _write(descriptor: int, text: str, folder: Path) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}; free some space or check its owner"
        ) from error


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
