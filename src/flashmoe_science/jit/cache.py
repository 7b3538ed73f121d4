"""The compile cache: what one recipe compiles to, kept under the recipe's own hash.

A recipe names everything that determines the compiled bytes, so its SHA-256 is the entry's address and an
entry is never out of date. One entry is three files in one flat directory::

    <key><suffix>   the artifact (.so, .cubin)
    <key>.json      the record: recipe, the artifact's size and SHA-256, compile time, log, resources
    <key>.lock      held with flock(2) while the entry is being built or removed

The artifact is in place, under its final name and flushed to disk, before the record that vouches for it,
and both arrive by rename, so that a reader sees a whole entry or none. An artifact whose size or hash differs
from its record counts as absent and is built again. An artifact that a process has already loaded survives:
replacing it makes a new inode.

Code from this directory is loaded into the process, so the directory belongs to this user and nobody else may
write to it; otherwise it is refused (see `cache_directory`).

Use, on either side::

    def compile_to(path: Path) -> Compilation:
        path.write_bytes(cubin)
        return Compilation(log=log, resources=resources)

    build = default_cache().get_or_build(recipe, ".cubin", compile_to)
    build.artifact  # verified, ready to load
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from flashmoe_science.errors import BuildError, DeviceError
from flashmoe_science.jit.records import KernelBuild, Recipe, Resources

DIRECTORY_VARIABLE = "FLASHMOE_CACHE_DIR"
_FOLDER = "flashmoe_science"
_FORMAT = 1
_LOCK_SUFFIX = ".lock"
_RECORD_SUFFIX = ".json"
_TOOLS = "flashmoe_science-tools"
_ENTRY_FILE = re.compile(r"([0-9a-f]{64})\.")
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR)


@dataclass(frozen=True)
class Compilation:
    """What a compile function reports after it has written the artifact."""

    log: str = ""
    """What the compiler printed."""
    resources: Resources | None = None
    """What the kernel needs of a GPU; None for host code."""


@dataclass(frozen=True)
class Cleared:
    """What `CompileCache.clear` removed."""

    entries: int
    bytes: int


def recipe_key(recipe: Recipe) -> str:
    """The content address of a recipe: SHA-256 of its canonical JSON, 64 hexadecimal digits."""
    canonical = json.dumps({"format": _FORMAT, **asdict(recipe)}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def cache_directory() -> Path:
    """The cache's directory: made if it is missing (mode 0700), and checked.

    ``$FLASHMOE_CACHE_DIR``, else ``$XDG_CACHE_HOME/flashmoe_science``, else ``~/.cache/flashmoe_science``.
    Where neither of the last two can be written (a read-only or missing home),
    ``<tmp>/flashmoe_science-<uid>`` under the same rules. A directory that was named explicitly is never
    replaced by another.

    Raises:
        DeviceError: the directory cannot be made, belongs to somebody else, or can be written by others.
    """
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        return _private_directory(Path(named).expanduser().absolute())
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    directory = Path(os.path.expanduser(base)).absolute() / _FOLDER
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = os.access(directory, os.W_OK | os.X_OK)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise DeviceError(_cannot_make(directory, error)) from error
        usable = False
    if not usable:
        directory = Path(tempfile.gettempdir()).absolute() / f"{_FOLDER}-{os.getuid()}"
        # Others can write where it lies: a link there may be theirs.
        return _private_directory(directory, follow=False)
    return _private_directory(directory)


def default_cache() -> CompileCache:
    """The cache that the environment names; see `cache_directory`."""
    return CompileCache(cache_directory())


class CompileCache:
    """Compiled kernels in one private directory. Safe with concurrent threads and processes."""

    def __init__(self, directory: Path) -> None:
        """Use `directory`: made (0700) if missing, refused (DeviceError) if others can write to it."""
        self.directory = _private_directory(directory)

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
        found = self._read(key)
        if found is not None:
            return found
        with self._locked(key):
            found = self._read(key)
            if found is not None:
                return found
            return self._build(key, recipe, suffix, compile_to)

    def find(self, recipe: Recipe) -> KernelBuild | None:
        """The entry of `recipe` if it is there and intact; compiles nothing."""
        return self._read(recipe_key(recipe))

    def entries(self) -> list[KernelBuild]:
        """All intact entries, by kernel name and key."""
        keys = (path.stem for path in self.directory.glob("*" + _RECORD_SUFFIX))
        builds = [build for build in map(self._read, keys) if build is not None]
        return sorted(builds, key=lambda build: (build.recipe.label, build.key))

    def clear(self) -> Cleared:
        """Remove every entry, damaged ones and leftovers too, and the tools' own caches.

        Other files, should the directory hold any, stay.

        Raises:
            BuildError: something cannot be locked or removed (a read-only cache).
        """
        count = size = 0
        ours = filter(None, (_ENTRY_FILE.match(path.name) for path in self.directory.iterdir()))
        for key in sorted({match[1] for match in ours}):
            with self._locked(key):
                entry = [path for path in self.directory.glob(key + ".*") if path.suffix != _LOCK_SUFFIX]
                count += any(path.suffix == _RECORD_SUFFIX for path in entry)
                try:
                    for path in entry:
                        size += path.lstat().st_size
                        _remove(path)
                    (self.directory / (key + _LOCK_SUFFIX)).unlink()
                except OSError as error:
                    raise BuildError(
                        f"cannot clear the compile cache {self.directory}: {error.strerror}; "
                        "remove the directory yourself"
                    ) from error
        shutil.rmtree(self.directory / _TOOLS, ignore_errors=True)
        return Cleared(entries=count, bytes=size)

    def tool_directory(self, name: str) -> Path:
        """A private directory for what a compiler itself caches, e.g. Zig's libc++; removed by `clear`."""
        directory = self.directory / _TOOLS / name
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory

    def _read(self, key: str) -> KernelBuild | None:
        """The entry if it is whole, else None: whatever is wrong with it, the answer is to build it again."""
        try:
            record = json.loads((self.directory / (key + _RECORD_SUFFIX)).read_bytes())
            suffix, digest, size = record["suffix"], record["artifact_sha256"], record["artifact_bytes"]
            artifact = self.directory / (key + suffix)
            if artifact.parent != self.directory:
                return None
            recipe = Recipe(**{**record["recipe"], "flags": tuple(record["recipe"]["flags"])})
            resources = None if record["resources"] is None else Resources(**record["resources"])
            content = artifact.read_bytes()
            if recipe_key(recipe) != key or len(content) != size:
                return None
            if hashlib.sha256(content).hexdigest() != digest:
                return None
            return KernelBuild(
                recipe=recipe,
                key=key,
                artifact=artifact,
                artifact_bytes=size,
                compile_seconds=float(record["compile_seconds"]),
                cached=True,
                log=str(record["log"]),
                resources=resources,
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _build(
        self, key: str, recipe: Recipe, suffix: str, compile_to: Callable[[Path], Compilation]
    ) -> KernelBuild:
        # Both names begin with the key, so that clear() also finds what a killed process left behind.
        temporary = self.directory / f"{key}.{os.getpid()}.new{suffix}"
        artifact = self.directory / (key + suffix)
        try:
            _remove(temporary)
            start = time.perf_counter()
            compilation = compile_to(temporary)
            seconds = time.perf_counter() - start
            try:
                content = temporary.read_bytes()
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
            _flush(temporary)
            _replace(temporary, artifact)
            temporary = self.directory / f"{key}.{os.getpid()}.new{_RECORD_SUFFIX}"
            temporary.write_text(json.dumps(record, indent=1))
            _flush(temporary)
            _replace(temporary, self.directory / (key + _RECORD_SUFFIX))
            _flush(self.directory)
        except OSError as error:
            raise BuildError(
                f"cannot write {recipe.label} to the compile cache {self.directory}: {error.strerror}; "
                f"free some space there or set {DIRECTORY_VARIABLE} to another directory"
            ) from error
        finally:
            _remove(temporary)
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

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Hold the entry's lock. The kernel lets go of it when the process dies, so no lock is ever stale."""
        path = self.directory / (key + _LOCK_SUFFIX)
        descriptor = -1
        try:
            while True:
                try:
                    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                except IsADirectoryError:
                    shutil.rmtree(path)
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                # clear() removes lock files: one that went while we waited for it excludes nobody any more.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                        break
                os.close(descriptor)
                descriptor = -1
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise BuildError(
                f"cannot lock {path}: {error.strerror}; "
                f"set {DIRECTORY_VARIABLE} to a directory on a local, writable file system"
            ) from error
        try:
            yield
        finally:
            os.close(descriptor)


def _private_directory(directory: Path, follow: bool = True) -> Path:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat() if follow else directory.lstat()
    except OSError as error:
        raise DeviceError(_cannot_make(directory, error)) from error
    if stat.S_ISLNK(found.st_mode):
        raise DeviceError(
            f"the compile cache {directory} is a symbolic link, so code in it cannot be trusted; "
            f"remove it or set {DIRECTORY_VARIABLE} to a directory of your own"
        )
    if found.st_uid != os.getuid():
        raise DeviceError(
            f"the compile cache {directory} belongs to user {found.st_uid}, not to this one ({os.getuid()}), "
            f"so code in it cannot be trusted; set {DIRECTORY_VARIABLE} to a directory of your own"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DeviceError(
            f"the compile cache {directory} can be written by other users, so code in it cannot be trusted; "
            f"run: chmod 700 {directory}"
        )
    return directory


def _cannot_make(directory: Path, error: OSError) -> str:
    return (
        f"the compile cache {directory} cannot be made: {error.strerror}; "
        f"set {DIRECTORY_VARIABLE} to a directory that you can write"
    )


def _remove(path: Path) -> None:
    """Also where a folder lies in the place of a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _replace(path: Path, target: Path) -> None:
    """By rename; a folder in the target's place goes."""
    try:
        path.replace(target)
    except IsADirectoryError:
        shutil.rmtree(target)
        path.replace(target)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
