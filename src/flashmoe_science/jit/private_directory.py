"""A folder whose files may be trusted because only this user (and root) can have written them.

Code from the compile cache runs in this process, so what it comes from is checked as OpenSSH checks its keys. Every
folder from the root down belongs to root or to this user, and nobody else can rename what is in it. Each file is a
regular one of this user's with a single name. All of it is checked on open descriptors, and files are reached through
the folder's descriptor: nothing that is swapped afterwards is looked at again.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flashmoe_science.errors import DeviceError

DIRECTORY_VARIABLE = "FLASHMOE_CACHE_DIR"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OWN_INSTEAD = f"set {DIRECTORY_VARIABLE} to a directory of your own"
# A FIFO in a file's place must not hold us up, and a link leads elsewhere.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class OpenToOthersError(DeviceError):
    """Other users can write to the folder itself, which belongs to this one."""


class UnsafeParentError(DeviceError):
    """Other users can change a folder that the folder lies in."""


class PrivateDirectory:
    """The open folder. Its descriptor is closed with the object."""

    def __init__(self, path: Path, *, follow: bool = True, accept_open: bool = False) -> None:
        """Open `path`; what is missing of it is made with mode 0700, whatever the umask.

        Args:
            follow: take a folder that `path` is a symbolic link to. Not where others can write to its parent.
            accept_open: take a folder that others can write to, in order to close it.

        Raises:
            OpenToOthersError: others can write to it.
            UnsafeParentError: others can change what it lies in.
            DeviceError: it cannot be made or opened, or belongs to somebody else.
        """
        try:
            self.path = make_private(path, follow)
            self.descriptor = _open_checked(self.path)
        except OSError as error:
            raise DeviceError(
                f"the compile cache {path} cannot be made: {error.strerror}; "
                f"set {DIRECTORY_VARIABLE} to a directory that you can write"
            ) from error
        weakref.finalize(self, os.close, self.descriptor)
        status = os.fstat(self.descriptor)
        if status.st_uid != os.geteuid():
            raise DeviceError(
                f"the compile cache {path} belongs to user {status.st_uid}, not to this one ({os.geteuid()}), "
                f"so code in it cannot be trusted; {_OWN_INSTEAD}"
            )
        if status.st_mode & _WRITABLE_BY_OTHERS and not accept_open:
            raise OpenToOthersError(
                f"the compile cache {path} can be written by other users, so code in it cannot be trusted; "
                f"empty it and close it to them with: cudadent42 cache clear; or {_OWN_INSTEAD}"
            )

    def read(self, name: str, most_bytes: int) -> bytes:
        """The content of a file of this user's.

        Raises:
            OSError: there is none, or it is no regular file of this user's that only they can write and that has one
                name, or it is longer than `most_bytes`.
        """
        with self.opened(name) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > most_bytes:
                raise OSError(f"{name} has {size} bytes")
            with os.fdopen(os.dup(descriptor), "rb") as file:
                return file.read(most_bytes)

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """A descriptor to read a file from; checks and errors as `read`."""
        descriptor = os.open(name, _READ, dir_fd=self.descriptor)
        try:
            if not is_own_file(os.fstat(descriptor)):
                raise OSError(f"{name} is not a file of this user's alone")
            yield descriptor
        finally:
            os.close(descriptor)

    def names(self) -> list[str]:
        return os.listdir(self.descriptor)

    def by_descriptor(self, name: str) -> str:
        """A path of a file for this process that leads through the open folder, whatever its own path leads to now.

        It is good while this object lives.
        """
        path = f"/proc/self/fd/{self.descriptor}"
        return f"{path}/{name}" if os.path.isdir(path) else str(self.path / name)

    def subdirectory(self, name: str) -> Path:
        """A folder of this user's in this one, made if it is missing.

        Raises:
            DeviceError: something else has its name, which was put there while others could write to this folder.
        """
        try:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.descriptor)
            descriptor = os.open(name, _FOLDER, dir_fd=self.descriptor)
            try:
                status = os.fstat(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DeviceError(
                f"{self.path / name} cannot be made: {error.strerror}; {_OWN_INSTEAD}"
            ) from error
        if status.st_uid != os.geteuid() or status.st_mode & _WRITABLE_BY_OTHERS:
            raise DeviceError(
                f"{self.path / name} was made by another user or can be written by others; "
                f"remove it, or {_OWN_INSTEAD}"
            )
        return self.path / name


def is_own_file(status: os.stat_result) -> bool:
    """Whether it is a regular file of this user's with one name, and nobody else can write to it."""
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & _WRITABLE_BY_OTHERS
        and status.st_nlink == 1
    )


def make_private(path: Path, follow: bool = True) -> Path:
    """The folder's real path, after what was missing of it has been made. Raises OSError where that fails."""
    path = path.absolute()
    missing = []
    parent = path
    while not os.path.lexists(parent):
        missing.append(parent)
        parent = parent.parent
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    if not follow and path.is_symlink():
        raise DeviceError(
            f"the compile cache {path} is a symbolic link, so code in it cannot be trusted; "
            f"remove it or {_OWN_INSTEAD}"
        )
    if follow:
        return Path(os.path.realpath(path, strict=True))
    return Path(os.path.realpath(path.parent, strict=True)) / path.name


def _open_checked(path: Path) -> int:
    """A descriptor of the folder at a real path, after every folder above it was found safe, from the root down.

    Each is opened by its name in the one before it and without following links, so that a path that is changed
    meanwhile is an error.
    """
    above = Path(path.anchor)
    descriptor = os.open(above, _FOLDER if above == path else _FOLDER | os.O_PATH)
    try:
        for name in path.parts[1:]:
            _check_above(os.fstat(descriptor), above, path)
            above = above / name
            inner = os.open(name, _FOLDER if above == path else _FOLDER | os.O_PATH, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _check_above(status: os.stat_result, folder: Path, path: Path) -> None:
    if status.st_uid not in (os.geteuid(), *_root_users()):
        raise UnsafeParentError(
            f"the compile cache {path} lies in {folder}, which belongs to user {status.st_uid}, "
            f"so code in it cannot be trusted; {_OWN_INSTEAD}"
        )
    writable = status.st_mode & _WRITABLE_BY_OTHERS
    # In a sticky folder only its owner and a file's own may rename it: /tmp.
    if writable and not status.st_mode & stat.S_ISVTX:
        if writable == stat.S_IWGRP and _is_private_group(status.st_gid):
            return
        raise UnsafeParentError(
            f"the compile cache {path} lies in {folder}, which other users can write to, "
            f"so code in it cannot be trusted; {_OWN_INSTEAD}"
        )


@functools.cache
def _root_users() -> tuple[int, ...]:
    """Root, and in a user namespace without a root the number that stands for whoever it does not know."""
    try:
        with open("/proc/self/uid_map") as lines:
            if any(int(line.split()[0]) == 0 for line in lines):
                return (0,)
        with open("/proc/sys/kernel/overflowuid") as number:
            return 0, int(number.read())
    except (OSError, ValueError):
        return (0,)


def _is_private_group(group: int) -> bool:
    """Whether a group is this user's own, of the same name and with no other member: folders made with umask 002."""
    try:
        user, members = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and members.gr_name == user.pw_name and set(members.gr_mem) <= {user.pw_name}
