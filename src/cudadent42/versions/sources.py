"""The source trees that are raced: exported from git, a working tree or a folder into a cache, by content.

Nothing of the user's repository is changed, checked out or locked: files are read from git's object store, or from
where they lie.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cudadent42.base import durable, git, parcels, trees
from cudadent42.base.errors import MachineNotReadyError, UsageError
from cudadent42.base.paths import is_bytecode, real_path
from cudadent42.base.reading import expanded, read_bytes
from cudadent42.base.trees import TreeDigest
from cudadent42.model.implementations import OUR_PACKAGE, is_kernel_file, is_our_variant, is_plug_in
from cudadent42.model.records import Version
from flashmoe_science.errors import DeviceError
from flashmoe_science.jit.cache import default_cache

WORKING_TREE = "WORKTREE"
"""Names the files as they are now, those that git does not track included, unless it ignores them."""

PACKAGE = OUR_PACKAGE
PACKAGE_FOLDERS = (f"src/{PACKAGE}", PACKAGE)
"""Where a tree may have the package."""

_ENTRY = "path/to/file.py:callable or path/to/kernel.toml"
_FOLDER_STARTS = ("/", "./", "../", "~")
_CACHE_FOLDER = "sources"
_REGULAR_FILES = (b"100644", b"100755")
_ATTEMPTS = 3


@dataclass(frozen=True)
class _File:
    path: str
    """Relative, with slashes."""
    content: bytes


def export(revision: str, repository: Path | None = None, entry: str = "") -> Version:
    """The tree of a revision, ``WORKTREE`` or a folder, exported into the cache.

    Args:
        revision: anything that git understands; a folder begins with ``/``, ``./``, ``../`` or ``~``.
        repository: a folder in the git repository; the current one if None.
        entry: ``path/to/file.py:callable`` or ``path/to/kernel.toml`` in the tree; then the whole tree is exported.
            Empty, or a variant such as ``cudadent42[portable]``: the package ``flashmoe_science``.

    Raises:
        UsageError: there is no such revision or folder, or it lacks what is to be raced.
    """
    if not (is_of_package(entry) or is_plug_in(entry)):
        raise _no_entry(entry)
    file = "" if is_of_package(entry) else entry
    folder = as_folder(revision)
    if folder is not None:
        return _keep(_folder_files(folder, file), real_path(folder).name, "", entry)
    root = repository_root(repository)
    if revision == WORKING_TREE:
        return _keep(_working_files(root, file), revision, "", entry)
    commit = resolve(revision, root)
    return _keep(_committed_files(root, commit, file), revision, commit, entry)


def is_of_package(entry: str) -> bool:
    """Whether the package ``flashmoe_science`` is raced, as it chooses its kernels or by a variant of its name."""
    return not entry or is_our_variant(entry)


def check_entry(entry: str, tree: Path) -> None:
    """Raises UsageError unless the entry names a file in the tree; see `export`."""
    if is_of_package(entry):
        return
    if not is_plug_in(entry):
        raise _no_entry(entry)
    path = PurePosixPath(entry_file(entry))
    if path.is_absolute() or ".." in path.parts or not (tree / path).is_file():
        raise UsageError(
            f"--implementation {entry!r}: {tree} has no such file; expected {_ENTRY}, in the tree"
        )


def _no_entry(entry: str) -> UsageError:
    return UsageError(
        f"--implementation {entry!r}: expected {_ENTRY}, in the tree, or a variant such as 'cudadent42[portable]'"
    )


def entry_file(entry: str) -> str:
    """The file that an entry names, relative to the top of the tree."""
    return entry if is_kernel_file(entry) else entry.rpartition(":")[0]


def as_folder(revision: str) -> Path | None:
    """The folder that a revision names, if it is written as one."""
    if revision == "." or revision.startswith(_FOLDER_STARTS):
        folder = expanded(revision)
        if not folder.is_dir():
            raise UsageError(
                f"{revision} is not a folder; expected a git revision, {WORKING_TREE} or a folder"
            )
        return folder
    return None


def folder_of(version: Version) -> Path:
    """Where the files of an exported version are, or of one that was sent to this machine."""
    return parcels.tree_of(version.digest) or _cache() / version.digest


def checked_folder_of(version: Version) -> Path:
    """``folder_of``, once a process with all its files read: what is raced under a commit's name is that commit.

    Raises UsageError where they are gone, or are not those that were exported.
    """
    return check_folder(folder_of(version), version)


@functools.cache
def check_folder(folder: Path, version: Version) -> Path:
    """``checked_folder_of`` for a folder that is named."""
    if not folder.is_dir():
        raise UsageError(f"the files of {version.revision} are no longer in the cache; start the race again")
    if not trees.holds(folder, version.digest):
        raise UsageError(
            f"the files of {version.revision} in {folder} are not those that were exported: something has changed "
            "them since; start the race again, which exports them anew"
        )
    return folder


def repository_root(folder: Path | None) -> Path:
    """The top of the repository that ``folder`` (the current one if None) is in."""
    try:
        return git.root(folder or Path.cwd())
    except git.GitMissingError as error:
        raise _no_git() from error
    except git.GitError as error:
        raise UsageError(
            f"{folder or 'the current folder'} is not in a git repository that can be read ({error}); go to one, "
            "give --repo, or name two folders (./old ./new)"
        ) from error


def resolve(revision: str, root: Path) -> str:
    """The commit that a revision stands for."""
    commit = ask(root, "rev-parse", "--verify", "--quiet", names=(f"{revision}^{{commit}}",))
    if commit is None:
        hint = "; a folder begins with ./" if (Path.cwd() / revision).is_dir() else ""
        raise UsageError(
            f"{revision!r} is no revision of {root.name}; expected a commit, branch, tag or {WORKING_TREE}{hint}"
        )
    return commit.strip()


def ask(root: Path, *words: str, names: Sequence[str] = ()) -> str | None:
    """What git prints; None where it fails. Raises MachineNotReadyError where it is missing."""
    try:
        return git.text(root, *words, names=names)
    except git.GitMissingError as error:
        raise _no_git() from error
    except git.GitError:
        return None


def _no_git() -> MachineNotReadyError:
    return MachineNotReadyError("git is not installed; install it, or name two folders")


def _read_objects(root: Path, what: str, *words: str, names: Sequence[str] = (), given: bytes = b"") -> bytes:
    """What git prints. Raises UsageError, where it cannot be read, for the ``what`` that was wanted."""
    try:
        return git.run(root, *words, names=names, given=given)
    except git.GitMissingError as error:
        raise _no_git() from error
    except git.GitError as error:
        raise UsageError(f"git cannot {what} in {root.name} ({error}); is the repository whole?") from error


def _committed_files(root: Path, commit: str, entry: str) -> Iterator[_File]:
    listing = f"list the files of {commit[:12]}"
    listed = _read_objects(root, listing, "ls-tree", "-r", "-z", "--full-tree", names=(commit,))
    names: dict[str, bytes] = {}
    for line in listed.split(b"\0"):
        about, _, name = line.partition(b"\t")
        fields = about.split()
        if len(fields) == 3 and fields[0] in _REGULAR_FILES:
            names[os.fsdecode(name)] = fields[2]
    wanted = _selection(list(names), entry, commit[:12])
    objects = [names[path] for path in wanted.values()]
    reading = f"read the files of {commit[:12]}"
    data = _read_objects(
        root, reading, "cat-file", "--batch", given=b"".join(each + b"\n" for each in objects)
    )
    start = 0
    for path in wanted:
        line_end = data.index(b"\n", start)
        answer = data[start:line_end].split()
        if len(answer) != 3:  # "NAME missing"
            raise UsageError(
                f"git cannot {reading} in {root.name} ({path} is missing); is the repository whole? A partial clone's "
                "missing files are fetched by: git fetch --refetch --no-filter"
            )
        size = int(answer[2])
        start = line_end + 1
        yield _File(path, data[start : start + size])
        start += size + 1


def _working_files(root: Path, entry: str) -> Iterator[_File]:
    listed = _read_objects(
        root,
        "list the files",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--deduplicate",
    )
    names = [os.fsdecode(name) for name in listed.split(b"\0") if name]
    yield from _read(root, [name for name in names if trees.is_file(root / name)], entry, WORKING_TREE)


def _folder_files(folder: Path, entry: str) -> Iterator[_File]:
    if not entry and real_path(folder).name == PACKAGE:
        folder = real_path(folder).parent
    names = [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*"))
        if trees.is_file(path) and ".git" not in path.parts
    ]
    yield from _read(folder, names, entry, str(folder))


def _read(folder: Path, names: list[str], entry: str, where: str) -> Iterator[_File]:
    for path, name in _selection(names, entry, where).items():
        try:
            yield _File(path, read_bytes(folder / name, trees.MOST_BYTES))
        except OSError as error:
            raise UsageError(f"{folder / name} cannot be read: {error.strerror}") from error


def _selection(names: list[str], entry: str, where: str) -> dict[str, str]:
    """Path in the export to path in the tree, of the files that are wanted. Bytecode is none: it is never read."""
    names = [name for name in names if not is_bytecode(PurePosixPath(name))]
    if entry:
        file = PurePosixPath(entry_file(entry)).as_posix()
        if file not in names:
            raise UsageError(f"{where} has no file {file!r}; expected {_ENTRY}, from the top of the tree")
        return {name: name for name in sorted(names)}
    for folder in PACKAGE_FOLDERS:
        if f"{folder}/__init__.py" in names:
            length = len(folder) - len(PACKAGE)
            return {name[length:]: name for name in sorted(names) if name.startswith(f"{folder}/")}
    raise UsageError(
        f"{where} has no package {PACKAGE} (looked in {' and '.join(PACKAGE_FOLDERS)}); "
        f"name a kernel of your own with --implementation {_ENTRY}"
    )


def _keep(files: Iterator[_File], revision: str, commit: str, entry: str) -> Version:
    """The files in the cache, under the hash of their names and contents."""
    cache = _cache()
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=cache))
    try:
        digest = _write(files, temporary / "tree")
        _put(temporary, cache / digest, digest)
        durable.flush(cache)
    except OSError as error:
        raise UsageError(f"cannot export {revision} to {cache}: {error.strerror}; free some space") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Version(revision, commit, digest, entry)


def _put(temporary: Path, target: Path, digest: str) -> None:
    """Give the new tree its name, unless a whole one has it: one that was edited, or half written, makes way."""
    if target.is_dir() and trees.holds(target, digest):
        return
    durable.flush_tree(temporary)
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError):
            target.rename(temporary / f"old-{uuid.uuid4().hex}")
        try:
            (temporary / "tree").rename(target)
            return
        except OSError:  # another process was quicker
            if trees.holds(target, digest):
                return
    raise OSError(errno.EBUSY, f"others keep changing {target}")


def _write(files: Iterator[_File], folder: Path) -> str:
    folder.mkdir()
    digest = TreeDigest()
    total = 0
    for file in files:
        total += len(file.content)
        if total > trees.MOST_BYTES:
            raise UsageError(
                f"the tree has more than {trees.MOST_BYTES >> 30} GiB; a source tree is expected"
            )
        digest.add(file.path, file.content)
        if ".." in PurePosixPath(file.path).parts or file.path.startswith("/"):
            raise UsageError(f"the tree has a file named {file.path!r}, which would lie outside of it")
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
    return digest.hexadecimal()


def _cache() -> Path:
    try:
        return default_cache().tool_directory(_CACHE_FOLDER)
    except DeviceError as error:
        raise MachineNotReadyError(str(error)) from error
