"""The working tree as it is: what git tracks and what it would add, uncommitted changes too, ignored files not."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cudadent42.base import git
from cudadent42.base.errors import UsageError
from cudadent42.base.reading import open_file
from cudadent42.base.serialise import dumps
from cudadent42.runs.source import SOURCE_FILE, revision_of

_SKIPPED = ("benchmarks/results/",)
"""Committed results: large, and read by no run."""
DIGEST_FILE = ".digest"
_PIECE = 1 << 20


@dataclass(frozen=True)
class Tree:
    root: Path
    files: tuple[bytes, ...]
    """Paths below ``root``, sorted; as bytes, since a name need not be text."""
    source: bytes
    """The git revision and diff, for the manifest there: the repository itself is not sent."""
    digest: str
    """SHA-256 over all of it, with names and kinds: two trees with the same one are the same."""


def project_root() -> Path:
    """The checkout that this package runs from. Raises UsageError where there is none."""
    package = Path(__file__).resolve().parent
    with _git_of(package):
        root = git.root(package)
    if not (root / "tools/bootstrap.sh").is_file():
        raise UsageError(f"{root} is no checkout of cudadent42; a remote run sends one: run it from a clone")
    return root


def read_tree(root: Path) -> Tree:
    """What is to be sent. Raises UsageError where ``root`` is in no git repository."""
    with _git_of(root):
        listed = git.run(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    files = sorted(
        {name for name in listed.split(b"\0") if name and not _is_skipped(name) and _exists(root, name)}
    )
    digest = hashlib.sha256()
    for name in files:
        _update(digest, root, name)
    source = dumps(revision_of(root)).encode()
    digest.update(source)
    return Tree(root, tuple(files), source, digest.hexdigest())


def _is_skipped(name: bytes) -> bool:
    return any(name.startswith(prefix.encode()) for prefix in _SKIPPED)


def _exists(root: Path, name: bytes) -> bool:
    """Tracked files may have been deleted; a submodule's folder is no file."""
    path = os.path.join(os.fsencode(root), name)
    return os.path.lexists(path) and not (os.path.isdir(path) and not os.path.islink(path))


def _update(digest: hashlib._Hash, root: Path, name: bytes) -> None:
    path = os.path.join(os.fsencode(root), name)
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        kind, content = b"link", hashlib.sha256(os.readlink(path)).digest()
    else:
        kind = b"executable" if status.st_mode & stat.S_IXUSR else b"file"
        content = _digest_of(Path(os.fsdecode(path)))
    digest.update(b"%d %s %s " % (len(name), kind, name) + content)


def _digest_of(path: Path) -> bytes:
    digest = hashlib.sha256()
    try:
        with open_file(path) as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}), and it would be sent: remove it, or have git ignore it"
        ) from error
    return digest.digest()


@contextmanager
def archive(tree: Tree) -> Iterator[IO[bytes]]:
    """The tree as an open tar file."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for name in tree.files:
                text = os.fsdecode(name)
                tar.add(tree.root / text, arcname=text, recursive=False, filter=_plain)
            _add(tar, SOURCE_FILE, tree.source)
            _add(tar, DIGEST_FILE, tree.digest.encode())  # the last: it says that the archive is whole
        file.seek(0)
        yield file


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without this machine's user."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


@contextmanager
def _git_of(folder: Path) -> Iterator[None]:
    """git's failure as the user's error. Raises UsageError."""
    try:
        yield
    except git.GitMissingError as error:
        raise UsageError("git is not installed; a remote run sends what git lists: install git") from error
    except git.GitError as error:
        raise UsageError(f"{folder} is in no git checkout that can be read: {error}") from error
