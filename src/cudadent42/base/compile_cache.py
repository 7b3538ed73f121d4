"""The kernels' compile cache listed and emptied; `flashmoe_science.jit.cache` says what an entry's files are."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from flashmoe_science.errors import BuildError, DeviceError
from flashmoe_science.jit.cache import (
    DIRECTORY_VARIABLE,
    ENTRY_FILE,
    LOCK_SUFFIX,
    RECORD_SUFFIX,
    TOOLS,
    CompileCache,
    opened_directory,
    remove,
)
from flashmoe_science.jit.records import KernelBuild


@dataclass(frozen=True)
class Cleared:
    """What `clear` removed."""

    entries: int
    bytes: int


def entries(cache: CompileCache) -> list[KernelBuild]:
    """All intact entries, by kernel name and key."""
    records = (
        name for name in cache.folder.names() if name.endswith(RECORD_SUFFIX) and ENTRY_FILE.match(name)
    )
    builds = (cache.read(name.removesuffix(RECORD_SUFFIX)) for name in records)
    return sorted(filter(None, builds), key=lambda build: (build.recipe.label, build.key))


def empty_cache() -> tuple[Path, Cleared]:
    """Remove all that the cache that the environment names holds, also where other users can write to it.

    Such a directory is closed to them first: what they put there can then be neither loaded nor added to.

    Returns:
        The directory, and what was removed.

    Raises:
        DeviceError: it cannot be used, or others can write to it and it is not the cache's alone.
        BuildError: something in it cannot be removed.
    """
    directory = opened_directory(accept_open=True)
    if stat.S_IMODE(os.fstat(directory.descriptor).st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        strange = [name for name in directory.names() if not (ENTRY_FILE.match(name) or name == TOOLS)]
        if strange:
            raise DeviceError(
                f"{directory.path} can be written by other users and holds what is not the compile cache's "
                f"({strange[0]!r}), so it is left as it is; set {DIRECTORY_VARIABLE} to a directory of your own"
            )
        os.fchmod(directory.descriptor, 0o700)
    return directory.path, clear(CompileCache(directory))


def clear(cache: CompileCache) -> Cleared:
    """Remove every entry, damaged ones and leftovers too, and the tools' own caches.

    Other files, should the directory hold any, stay.

    Raises:
        BuildError: something cannot be locked or removed (a read-only cache).
    """
    count = size = 0
    ours = filter(None, map(ENTRY_FILE.match, cache.folder.names()))
    for key in sorted({match[1] for match in ours}):
        with cache.locked(key):
            entry = [path for path in cache.directory.glob(key + ".*") if path.suffix != LOCK_SUFFIX]
            count += any(path.suffix == RECORD_SUFFIX for path in entry)
            try:
                for path in entry:
                    size += path.lstat().st_size
                    remove(path)
                (cache.directory / (key + LOCK_SUFFIX)).unlink()
            except OSError as error:
                raise BuildError(
                    f"cannot clear the compile cache {cache.directory}: {error.strerror}; "
                    "remove the directory yourself"
                ) from error
    tools = cache.directory / TOOLS
    if os.path.lexists(tools):
        try:
            remove(tools)
        except OSError as error:
            raise BuildError(
                f"cannot remove {tools}: {error.strerror}; remove it yourself, or set {DIRECTORY_VARIABLE} to "
                "another directory"
            ) from error
    return Cleared(entries=count, bytes=size)
