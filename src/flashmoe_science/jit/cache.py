"""The compile cache: what one recipe compiles to, kept under the recipe's own hash.

A recipe names everything that determines the compiled bytes, so its SHA-256 is the entry's address and an
entry is never out of date. One entry is three files in one flat directory::

    <key><suffix>   the artifact (.so, .cubin)
    <key>.json      the record: recipe, the artifact's size and SHA-256, compile time, log, resources
    <key>.lock      held with flock(2) while the entry is being built or removed

The artifact is in place, under its final name and flushed to disk, before the record that vouches for it, and both
arrive by rename, so that a reader sees a whole entry or none. An artifact that is not as its record says counts as
absent and is built again; one that a process has already loaded survives, as replacing it makes a new inode.

Code from this directory is loaded into the process, so it and its files must be this user's alone, or they are refused
(see `private_directory`). Entries are read through the directory's open descriptor.

Use, on either side::

    def compile_to(path: Path) -> Compilation:
        path.write_bytes(cubin)
        return Compilation(log=log, resources=resources)

    build = default_cache().get_or_build(recipe, ".cubin", compile_to)
    build.artifact  # verified, ready to load
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashmoe_science.errors import BuildError, DeviceError, NoRoomError
from flashmoe_science.jit.notice import notice_of_waiting
from flashmoe_science.jit.private_directory import (
    DIRECTORY_VARIABLE,
    PrivateDirectory,
    UnsafeParentError,
    is_own_file,
    make_private,
)
from flashmoe_science.jit.records import KernelBuild, Recipe, Resources

__all__ = [
    "DIRECTORY_VARIABLE",
    "SEED_VARIABLE",
    "Compilation",
    "CompileCache",
    "cache_directory",
    "default_cache",
    "entry_changed",
    "read_artifact",
    "recipe_key",
]

SEED_VARIABLE = "FLASHMOE_CACHE_SEED"
"""Of a second cache, which is read and never written: what it has is copied when it is first asked for."""

_FOLDER = "flashmoe_science"
_FORMAT = 1
LOCK_SUFFIX = ".lock"
RECORD_SUFFIX = ".json"
TOOLS = "flashmoe_science-tools"
ENTRY_FILE = re.compile(r"([0-9a-f]{64})\.")
_SUFFIX = re.compile(r"\.[A-Za-z0-9_]{1,16}")
# Far above any kernel's, and far below what reading it would cost.
_MOST_RECORD_BYTES = 16 << 20
_MOST_ARTIFACT_BYTES = 256 << 20
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR)


@dataclass(frozen=True)
class Compilation:
    """What a compile function reports after it has written the artifact."""

    log: str = ""
    """What the compiler printed."""
    resources: Resources | None = None
    """What the kernel needs of a GPU; None for host code."""


def recipe_key(recipe: Recipe) -> str:
    """The content address of a recipe: SHA-256 of its canonical JSON, 64 hexadecimal digits."""
    canonical = json.dumps({"format": _FORMAT, **asdict(recipe)}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def cache_directory() -> Path:
    """The cache's directory: made if it is missing (mode 0700), and checked.

    ``$FLASHMOE_CACHE_DIR``, else ``$XDG_CACHE_HOME/flashmoe_science``, else ``~/.cache/flashmoe_science``.
    Where neither of the last two can be written (a read-only or missing home, or a user without one),
    ``<tmp>/flashmoe_science-<uid>`` under the same rules. A directory that was named explicitly is never
    replaced by another.

    Raises:
        OpenToOthersError: other users can write to it.
        DeviceError: the directory cannot be made, or others can change it or what is above it.
    """
    return opened_directory().path


def default_cache() -> CompileCache:
    """The cache that the environment names; errors as `cache_directory`."""
    return CompileCache(opened_directory())


def opened_directory(accept_open: bool = False) -> PrivateDirectory:
    """`cache_directory`, open; with ``accept_open`` also one that others can write to, in order to close it."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        expanded = os.path.expanduser(named)
        if expanded.startswith("~"):
            raise DeviceError(
                f"{DIRECTORY_VARIABLE} is {named}, and that user has no home directory; give a full path"
            )
        return PrivateDirectory(Path(expanded), accept_open=accept_open)
    base = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    # A user without a home (no HOME, no entry in the table of users) leaves the tilde as it is.
    if not base.startswith("~"):
        directory = Path(base).absolute() / _FOLDER
        # A home of somebody else's (that of a container's host) is as good as none.
        with contextlib.suppress(UnsafeParentError):
            if _can_use(directory):
                return PrivateDirectory(directory, accept_open=accept_open)
    directory = Path(tempfile.gettempdir()).absolute() / f"{_FOLDER}-{os.geteuid()}"
    # Others can write where it lies: a link there may be theirs.
    return PrivateDirectory(directory, follow=False, accept_open=accept_open)


def _can_use(directory: Path) -> bool:
    """Whether this user can write to it, after it has been made if it was missing."""
    try:
        make_private(directory)
    except OSError as error:
        if error.errno in _UNWRITABLE:
            return False
        raise DeviceError(
            f"the compile cache {directory} cannot be made: {error.strerror}; "
            f"set {DIRECTORY_VARIABLE} to a directory that you can write"
        ) from error
    return os.access(directory, os.W_OK | os.X_OK)


def read_artifact(build: KernelBuild) -> bytes:
    """The artifact of an entry, as its record describes it now.

    Raises:
        BuildError: it has gone or was changed since it was built or found.
    """
    content = CompileCache(build.artifact.parent).content(build.key)
    if content is None:
        raise entry_changed(build)
    return content


def entry_changed(build: KernelBuild) -> BuildError:
    """The error of an entry that is no longer what it was."""
    return BuildError(
        f"{build.recipe.label} cannot be loaded: {build.artifact} has gone or was changed since it was built; "
        "try again"
    )


class CompileCache:
    """Compiled kernels in one private directory. Safe with concurrent threads and processes."""

    def __init__(self, directory: Path | PrivateDirectory) -> None:
        """Use `directory`: made (0700) if missing, refused (DeviceError) if others can change it."""
        self.folder = directory if isinstance(directory, PrivateDirectory) else PrivateDirectory(directory)
        self.directory = self.folder.path

    def get_or_build(
        self, recipe: Recipe, suffix: str, compile_to: Callable[[Path], Compilation]
    ) -> KernelBuild:
        """The entry of `recipe`, compiled now if it is absent or damaged.

        Of several processes that want the same entry one compiles it and the others wait.

        Args:
            recipe: everything that determines the compiled bytes.
            suffix: the artifact's file name extension, with the dot.
            compile_to: writes the artifact to the path it is given (a temporary name in the cache); returns
                what the compiler said. Errors that it raises pass through, and nothing is kept.

        Raises:
            BuildError: the entry could not be written (disk full, no locks on this file system), or
                `compile_to` left no artifact.
        """
        key = recipe_key(recipe)
        cached = self.read(key)
        if cached is not None:
            return cached
        waiting = f"compiling {recipe.label}, once; the next process finds it in {self.directory}"
        with notice_of_waiting(waiting), self.locked(key):
            cached = self.read(key)
            if cached is not None:
                return cached
            return self._build(key, recipe, suffix, compile_to)

    def content(self, key: str) -> bytes | None:
        """The artifact of an intact entry, else None."""
        entry = self._verified(key)
        return None if entry is None else entry[1]

    def path_to_load(self, key: str) -> str | None:
        """A path of an intact entry's artifact through this object's open directory, good while it lives, else None."""
        entry = self._verified(key)
        return None if entry is None else self.folder.by_descriptor(entry[0].artifact.name)

    def tool_directory(self, name: str) -> Path:
        """A private directory for what a compiler itself caches, e.g. Zig's libc++."""
        tools = PrivateDirectory(self.folder.subdirectory(TOOLS), follow=False)
        return tools.subdirectory(name)

    def read(self, key: str) -> KernelBuild | None:
        """An intact entry, else None; compiles nothing."""
        entry = self._verified(key)
        if entry is None and self._copied_from_seed(key):
            entry = self._verified(key)
        return None if entry is None else entry[0]

    def _copied_from_seed(self, key: str) -> bool:
        """Whether the cache that ``$FLASHMOE_CACHE_SEED`` names had an intact entry, which this one has then too."""
        named = os.environ.get(SEED_VARIABLE)
        if not named or Path(named) == self.directory or not Path(named).is_dir():
            return False
        seed = CompileCache(Path(named))
        entry = seed._verified(key)
        if entry is None:
            return False
        build, content = entry
        record = seed.folder.read(key + RECORD_SUFFIX, _MOST_RECORD_BYTES)
        with contextlib.suppress(
            OSError
        ):  # a full disk: it is compiled then, and what is wrong is said there
            self._store(key, build.artifact.suffix, content)
            self._store(key, RECORD_SUFFIX, record)
            return True
        return False

    def _verified(self, key: str) -> tuple[KernelBuild, bytes] | None:
        """The entry and its artifact if both files are this user's, whole and belong together.

        Else None: whatever is wrong with it, the answer is to build it again.
        """
        try:
            record = json.loads(self.folder.read(key + RECORD_SUFFIX, _MOST_RECORD_BYTES))
            suffix, digest, size = record["suffix"], record["artifact_sha256"], record["artifact_bytes"]
            if not _SUFFIX.fullmatch(suffix):
                return None
            recipe = Recipe(**{**record["recipe"], "flags": tuple(record["recipe"]["flags"])})
            seconds = float(record["compile_seconds"])
            resources = None if record["resources"] is None else _resources(record["resources"])
            if recipe_key(recipe) != key or not (math.isfinite(seconds) and seconds >= 0):
                return None
            content = self.folder.read(key + suffix, _MOST_ARTIFACT_BYTES)
            if len(content) != size or hashlib.sha256(content).hexdigest() != digest:
                return None
            build = KernelBuild(
                recipe=recipe,
                key=key,
                artifact=self.directory / (key + suffix),
                artifact_bytes=len(content),
                compile_seconds=seconds,
                cached=True,
                log=str(record["log"]),
                resources=resources,
            )
            return build, content
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def _build(
        self, key: str, recipe: Recipe, suffix: str, compile_to: Callable[[Path], Compilation]
    ) -> KernelBuild:
        # Temporary names begin with the key too, so that emptying the cache finds what a killed process left.
        made = self.directory / f"{key}.{os.getpid()}.new{suffix}"
        try:
            remove(made)
            start = time.perf_counter()
            compilation = compile_to(made)
            seconds = time.perf_counter() - start
            try:
                content = made.read_bytes()
            except FileNotFoundError as error:
                raise BuildError(
                    f"{recipe.compiler} reported success for {recipe.label} but wrote no artifact; "
                    "run it by hand with the recipe's flags",
                    compilation.log,
                ) from error
            record = {
                "format": _FORMAT,
                "recipe": asdict(recipe),
                "suffix": suffix,
                "artifact_sha256": hashlib.sha256(content).hexdigest(),
                "artifact_bytes": len(content),
                "compile_seconds": seconds,
                "created_unix": time.time(),
                "log": compilation.log,
                "resources": None if compilation.resources is None else asdict(compilation.resources),
            }
            self._store(key, suffix, content)
            self._store(key, RECORD_SUFFIX, json.dumps(record, indent=1).encode())
            os.fsync(self.folder.descriptor)
        except OSError as error:
            raise NoRoomError(
                f"cannot write {recipe.label} to the compile cache {self.directory}: {error.strerror}; "
                f"free some space there or set {DIRECTORY_VARIABLE} to another directory"
            ) from error
        finally:
            remove(made)
        artifact = self.directory / (key + suffix)
        return KernelBuild(
            recipe=recipe,
            key=key,
            artifact=artifact,
            artifact_bytes=len(content),
            compile_seconds=seconds,
            cached=False,
            log=compilation.log,
            resources=compilation.resources,
        )

    def _store(self, key: str, suffix: str, content: bytes) -> None:
        """Write a file of an entry, which only this user can read or write whatever the umask, by rename."""
        # A new file: the compiler's own may have other names or other writers.
        temporary = f"{key}.{os.getpid()}.stored{suffix}"
        folder = self.folder.descriptor
        self._remove_strange(temporary)
        descriptor = os.open(temporary, _WRITE, 0o600, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            self._remove_strange(key + suffix)
            os.replace(temporary, key + suffix, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(temporary, dir_fd=folder)
            raise

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Hold the entry's lock. The kernel lets go of it when the process dies, so no lock is ever stale."""
        name = key + LOCK_SUFFIX
        descriptor = -1
        try:
            while True:
                self._remove_strange(name)
                descriptor = os.open(name, _OPEN_LOCK, 0o600, dir_fd=self.folder.descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                # A lock file is removed with its entry: one that went while we waited for it excludes nobody any more.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.stat(name, dir_fd=self.folder.descriptor)):
                        break
                os.close(descriptor)
                descriptor = -1
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise NoRoomError(
                f"cannot lock {self.directory / name}: {error.strerror}; "
                f"set {DIRECTORY_VARIABLE} to a directory on a local, writable file system"
            ) from error
        try:
            yield
        finally:
            os.close(descriptor)

    def _remove_strange(self, name: str) -> None:
        """What is no file of this user's in the place of one: a folder, a link, a FIFO, somebody else's."""
        try:
            if not is_own_file(os.stat(name, dir_fd=self.folder.descriptor, follow_symlinks=False)):
                remove(self.directory / name)
        except FileNotFoundError:
            pass


def _resources(fields: dict[str, Any]) -> Resources:
    """Raises TypeError where a field is missing, unknown, or no number."""
    resources = Resources(**fields)
    for field in dataclasses.fields(Resources):
        number = getattr(resources, field.name)
        if isinstance(number, bool) or not isinstance(number, (int, float) if field.type == "float" else int):
            raise TypeError(f"{field.name} is {number!r}")
    return resources


def remove(path: Path) -> None:
    """Also where a folder lies in the place of a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
