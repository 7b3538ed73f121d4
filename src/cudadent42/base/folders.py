"""Where the lab keeps what belongs to the user and not to a run: settings, and what it has counted.

A user without a home (no HOME, no entry in the table of users, as in many containers) has a private folder among the
temporary ones. Never the current folder: what lies there, in a place called ``~``, may be anybody's.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cudadent42.base.errors import UsageError

_NAME = "cudadent42"


def config_folder() -> Path:
    """``$XDG_CONFIG_HOME/cudadent42``, else ``~/.config/cudadent42``. Not made here: it may well be absent."""
    return _base("XDG_CONFIG_HOME", ".config") / _NAME


def state_folder() -> Path:
    """``$XDG_STATE_HOME/cudadent42``, else ``~/.local/state/cudadent42``; as ``config_folder``."""
    return _base("XDG_STATE_HOME", ".local/state") / _NAME


def make_private(folder: Path) -> Path:
    """Make the folder for this user alone, if it is missing. Raises UsageError where that fails."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make {folder}: {error.strerror}; set XDG_CONFIG_HOME and XDG_STATE_HOME to writable folders"
        ) from error
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time, the others wait; by flock(2), which ends with its process. Raises UsageError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"cannot write to {path.parent}: {error.strerror}; check its owner") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether a process has it locked, as far as this machine can tell; takes no lock itself."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def _base(variable: str, default: str) -> Path:
    named = os.environ.get(variable, "")
    # The XDG specification: a relative path is invalid and to be ignored.
    if named.startswith("/"):
        return Path(named)
    home = os.path.expanduser("~")
    return (Path(home) if home.startswith("/") else _instead_of_home()) / default


def _instead_of_home() -> Path:
    """Made here, so that nobody else can make it first. Raises UsageError where somebody did."""
    folder = Path(tempfile.gettempdir()).absolute() / f"{_NAME}-home-{os.getuid()}"
    make_private(folder)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UsageError(
            f"there is no home directory, and {folder} is not a folder of this user's alone; set HOME to your own"
        )
    return folder
