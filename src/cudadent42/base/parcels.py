"""Files that were sent to this machine: kernels of a coordinator that does not share its disk with a fleet's workers.

    names/KEY.json     which tree a path of the machine that sent it stands for
    trees/DIGEST/      the files

The folder is this user's alone, and its name is in the environment of whoever works there and of what they start.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cudadent42.base import archives, trees
from cudadent42.base.archives import DamagedError, Limits
from cudadent42.base.errors import UsageError
from cudadent42.base.files import read_record, write_json

FOLDER_VARIABLE = "CUDADENT42_PARCELS"

LIMITS = Limits(most_bytes=trees.MOST_BYTES, most_files=100_000)

_DIGEST = re.compile("[0-9a-f]{64}")
_NAMES = "names"
_TREES = "trees"
_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Parcel:
    """What is sent of an implementation in a file, or of a version of a source tree."""

    digest: str
    """SHA-256 over the names and contents of its files."""
    name: str = ""
    """The path that plans name. Empty for a version, which is asked for by its digest."""
    entry: str = ""
    """The file that the path stands for, relative."""
    schema_version: int = _SCHEMA_VERSION


def folder() -> Path | None:
    """Where parcels lie for this process; None where there are none."""
    named = os.environ.get(FOLDER_VARIABLE, "")
    return Path(named) if os.path.isabs(named) else None


def make(root: Path) -> Path:
    """The folder, for this user alone. Raises UsageError where it cannot be made so."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        for name in (_NAMES, _TREES):
            (root / name).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {root}, a folder of this user's alone: {error.strerror}") from error
    return root


def place(parcel: Parcel, packed: bytes, root: Path) -> None:
    """Unpack what was sent below ``root``, which `make` made.

    Raises:
        DamagedError: it is no such archive, leads out of its folder, or is not what its digest is of.
        TooMuchError: it holds more than is taken.
        OSError: the disk does not take it.
    """
    if not _DIGEST.fullmatch(parcel.digest):
        raise DamagedError(f"a digest of {parcel.digest[:80]!r}; expected a SHA-256")
    tree = root / _TREES / parcel.digest
    if not tree.is_dir():
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
        try:
            (new / "packed").write_bytes(packed)
            archives.unpack(new / "packed", new / "tree", LIMITS)
            if not trees.holds(new / "tree", parcel.digest):
                raise DamagedError("the files are not those that the digest is of")
            os.rename(new / "tree", tree)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    if parcel.name:
        entry = PurePosixPath(parcel.entry)
        if entry.is_absolute() or ".." in entry.parts or not trees.is_file(tree / entry):
            raise DamagedError(f"{parcel.entry[:80]!r} is no file of it")
        write_json(_record(root, parcel.name), parcel)


def check(parcel: Parcel) -> None:
    """Raises UsageError unless these files are here, as they were sent, under the name that they were sent for."""
    root = folder()
    if root is None or (parcel.name and _parcel(root, parcel.name) != parcel):
        raise UsageError(
            f"{parcel.name or parcel.digest[:12]} was not sent here; start the same command again, which sends it"
        )
    _checked(root / _TREES / parcel.digest, parcel)


def path_of(name: str) -> Path | None:
    """Where the file lies that was sent for a path; None where none was.

    All its files are read, each time: a worker lives for many tasks, and what is raced is what was sent. Raises
    UsageError where it is not.
    """
    root = folder()
    parcel = None if root is None else _parcel(root, name)
    if root is None or parcel is None:
        return None
    return _checked(root / _TREES / parcel.digest, parcel) / parcel.entry


def tree_of(digest: str) -> Path | None:
    """Where the tree lies that was sent under a digest; None where none was. Whoever reads it checks it."""
    root = folder()
    if root is None or not _DIGEST.fullmatch(digest):
        return None
    tree = root / _TREES / digest
    return tree if tree.is_dir() else None


def _record(root: Path, name: str) -> Path:
    return root / _NAMES / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}.json"


def _parcel(root: Path, name: str) -> Parcel | None:
    return read_record(Parcel, _record(root, name), _SCHEMA_VERSION)


def _checked(tree: Path, parcel: Parcel) -> Path:
    if not trees.holds(tree, parcel.digest):
        raise UsageError(
            f"the files of {parcel.name or 'a version'} are not those that were sent ({parcel.digest[:12]}): something "
            "has changed them since; start the same command again, which sends them anew"
        )
    return tree
