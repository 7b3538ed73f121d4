"""A file tree of its own: a new root with nothing but what is given, read-only; mount_namespaces(7), pivot_root(2)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cudadent42.sandbox.syscalls import MOUNT_SETATTR, function, number, system_call

_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_REMOUNT, _BIND, _REC, _SLAVE = 32, 4096, 16384, 1 << 19
_KEPT_FLAGS = _NOSUID | _NODEV | _NOEXEC | 1024 | 2048
"""What a remount may not take away; ``statvfs`` has these bits where ``mount`` has them."""
_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID = 1, 2

NODES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
_MOST_LINKS = 40
TEMPORARY = ("/tmp", "/dev/shm")
"""Writable beside the scratch folder, for programs that know no other place."""


def mount_proc(target: str = "/proc") -> None:
    """The process namespace's own. It is refused in containers whose /proc has parts covered. Raises OSError."""
    function("mount", b"proc", os.fsencode(target), b"proc", _NOSUID | _NODEV | _NOEXEC, None)


def replace_root(
    readable: Iterable[str], devices: Iterable[str], scratch: str, scratch_bytes: int, *, own_proc: bool
) -> None:
    """Make the new root and go there, in a mount namespace of this process's own. Raises OSError.

    ``scratch`` is where the new root is built, and inside it the writable folder.
    """
    function("mount", None, b"/", None, _REC | _SLAVE, None)  # nothing that is mounted here is seen outside
    root = scratch
    _mount_memory(root, "size=4m,mode=0755")
    try:
        _fill(root, readable, devices, scratch_bytes, own_proc=own_proc)
        os.chdir(root)
        system_call("pivot_root", number("pivot_root"), b".", b".")
    except OSError:  # go on with the machine's tree, as it was
        os.chdir("/")
        function("umount2", os.fsencode(root), _DETACH)
        raise
    function("umount2", b".", _DETACH)
    os.chdir("/")


def _fill(
    root: str, readable: Iterable[str], devices: Iterable[str], scratch_bytes: int, *, own_proc: bool
) -> None:
    """The new root, at the path that will be the writable folder's in it."""
    for path in (*TEMPORARY, root):
        os.makedirs(root + path, exist_ok=True)
        _mount_memory(root + path, f"size={scratch_bytes},mode=0700")
    _add_proc(root, own_proc=own_proc)
    _add_all(root, (*readable, "/sys"))
    for path in filter(os.path.exists, (*NODES, *devices)):
        _add(root, path)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"{root}/dev/{name}")
    _make_read_only(root, recursive=False)


def _mount_memory(target: str, options: str) -> None:
    function("mount", b"tmpfs", os.fsencode(target), b"tmpfs", _NOSUID | _NODEV, options.encode())


def _add_proc(root: str, *, own_proc: bool) -> None:
    os.makedirs(f"{root}/proc", exist_ok=True)
    if own_proc:
        mount_proc(f"{root}/proc")
    else:
        _bind("/proc", f"{root}/proc")
    _make_read_only(f"{root}/proc", recursive=True)


def _resolved(path: str) -> tuple[list[str], str]:
    """The symbolic links on the way, and where they lead."""
    links: list[str] = []
    reached, parts = "/", [part for part in path.split("/") if part]
    while parts and len(links) < _MOST_LINKS:
        part = parts.pop(0)
        following = os.path.dirname(reached) if part == ".." else os.path.join(reached, part)
        if os.path.islink(following):
            target = os.readlink(following)
            links.append(following)
            parts = [each for each in target.split("/") if each not in ("", ".")] + parts
            following = "/" if os.path.isabs(target) else reached
        reached = following
    return links, reached


def _add_all(root: str, paths: Iterable[str]) -> None:
    """Read-only, at the same places. What does not exist is left out."""
    links: list[str] = []
    real: list[str] = []
    for path in map(os.path.abspath, paths):
        its_links, its_end = _resolved(path)
        links += its_links
        if os.path.exists(its_end):
            real.append(its_end)
    added: list[str] = []
    for path in sorted(dict.fromkeys(real), key=lambda each: each.count("/")):
        if not any(path.startswith(each.rstrip("/") + "/") for each in added):
            added.append(path)
            _add(root, path)
            _make_read_only(root + path, recursive=True)
    for link in dict.fromkeys(links):
        if not os.path.lexists(root + link):
            os.makedirs(os.path.dirname(root + link), exist_ok=True)
            os.symlink(os.readlink(link), root + link)


def _add(root: str, path: str) -> None:
    """A file or folder at the same place, as writable as it is."""
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        Path(target).touch()
    _bind(path, target)


def _bind(source: str, target: str) -> None:
    function("mount", os.fsencode(source), os.fsencode(target), None, _BIND | _REC, None)


def _make_read_only(target: str, *, recursive: bool) -> None:
    attributes = struct.pack("QQQQ", _ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    try:
        system_call(
            "mount_setattr", MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), flags, buffer, len(attributes)
        )
    except OSError:  # before Linux 5.12, and in gVisor: one by one
        for each in [target, *(_mounts_below(target) if recursive else ())]:
            kept = os.statvfs(each).f_flag & _KEPT_FLAGS
            function(
                "mount", None, os.fsencode(each), None, _REMOUNT | _BIND | _RDONLY | _NOSUID | kept, None
            )


def _mounts_below(target: str) -> list[str]:
    below = []
    with suppress(FileNotFoundError), open("/proc/self/mountinfo", encoding="utf-8") as lines:
        for line in lines:
            point = line.split()[4].encode().decode("unicode_escape")
            if point.startswith(target.rstrip("/") + "/"):
                below.append(point)
    return below
