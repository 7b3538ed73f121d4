"""The source under change, by way of git: snapshots, what differs between two, and taking a change back.

A snapshot is a commit that no branch leads to, made with an index of its own: the user's index, branch and files stay
as they are. A ref under ``refs/cudadent42/`` keeps it from being collected. The session folder holds what it changes as
a patch, from which the snapshot can be made again in any clone.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cudadent42.base import git
from cudadent42.base.errors import MachineNotReadyError, UsageError
from cudadent42.base.paths import is_bytecode
from cudadent42.runs.run_folder import LOG, MANIFEST

UNTRACKED_LIMIT = 1 << 20
"""Bytes of an untracked file up to which it counts as source."""

BUNDLE_LIMIT = 256 << 20
"""Bytes of all files up to which a session's folder holds the source itself. More is data, not source."""

BRANCH = "session"
"""Of a bundle, and of the repository that is made from it."""

_RESULTS = ("runs", "bisects")
"""Where the lab puts results that nobody names a folder for."""

_LOGS = (".log", ".out")
"""Of files that are no source: what the shell was told to write beside it."""

_PATCH = ("diff-tree", "-r", "-p", "--no-ext-diff", "--no-textconv", "--no-renames")
"""Not `git diff`: how that prints is the user's configuration (colours, prefixes, context)."""
_SHA1_DIGITS = 40
_MESSAGE = "snapshot of a session"
_BUNDLE_OF_SHA256 = "# v3 git bundle\n@object-format=sha256\n"
"""gitformat-bundle(5): the third version is for names that are not SHA-1."""
_IDENTITY = {
    name: value
    for who in ("AUTHOR", "COMMITTER")
    for name, value in (
        (f"GIT_{who}_NAME", "cudadent42"),
        (f"GIT_{who}_EMAIL", "session@localhost"),
        (f"GIT_{who}_DATE", "2000-01-01T00:00:00+0000"),  # the same content is the same commit
    )
}
_ABSENT = ""
_FILE, _EXECUTABLE, _LINK = "100644", "100755", "120000"
"""Modes of git's tree entries."""

_SOURCE = (":/", ":(top,exclude)sessions")
"""Everything but the sessions, which change while they watch the source, ignored or not."""


@dataclass(frozen=True)
class Tree:
    """A git working tree."""

    root: Path

    def head(self) -> str:
        return self._text("rev-parse", "--verify", "HEAD^{commit}").strip()

    def has(self, commit: str) -> bool:
        return self._try("cat-file", "-e", names=(f"{commit}^{{tree}}",)) is not None

    def snapshot(self) -> str:
        """The commit of a snapshot of the files as they are: tracked ones, and small new ones that are source."""
        head = self.head()
        with self._index() as environment:
            self._run("read-tree", names=(head,), environment=environment)
            # Not `git add --update`, which starts git in submodules, by their settings.
            changed = self._run(
                *("diff-files", "-z", "--name-only", "--no-relative", "--ignore-submodules=dirty"),
                paths=_SOURCE,
                environment=environment,
            )
            names = changed + b"".join(name + b"\0" for name in self._untracked())
            self._run(
                "update-index", "--add", "--remove", "-z", "--stdin", environment=environment, given=names
            )
            return self._commit(environment, head)

    def rebuild(self, head: str, patch: bytes) -> str:
        """The commit of a snapshot from the one that it was made over, and its patch.

        Raises UsageError where ``head`` is not here.
        """
        if not self.has(head):
            raise UsageError(
                f"{self.root.name} lacks the commit {head[:12]} that the session began at; fetch it, then try again"
            )
        with self._index() as environment:
            self._run("read-tree", names=(head,), environment=environment)
            if patch:
                self._run("apply", "--cached", "--whitespace=nowarn", environment=environment, given=patch)
            return self._commit(environment, head)

    def bundle(self, commit: str) -> bytes | None:
        """The files of a commit, without its history, as a git bundle; None where they are more than source is.

        `git clone` understands it, on a machine that has nothing else.
        """
        listed = self._run("ls-tree", "-r", "-l", "-z", "--full-tree", names=(commit,)).split(b"\0")
        sizes = (line.partition(b"\t")[0].split()[3] for line in listed if line)
        if sum(int(size) for size in sizes if size.isdigit()) > BUNDLE_LIMIT:
            return None
        root = self._root(f"{commit}^{{tree}}")
        packed = self._run("pack-objects", "--revs", "--stdout", "-q", given=f"{root}\n".encode())
        head = "# v2 git bundle\n" if len(root) == _SHA1_DIGITS else _BUNDLE_OF_SHA256
        return f"{head}{root} HEAD\n{root} refs/heads/{BRANCH}\n\n".encode() + packed

    def unbundle(self, file: Path) -> str:
        """The commit of a bundle, with its files now in the object store. Raises UsageError where it is no bundle."""
        told = self._text("bundle", "unbundle", names=(str(file.absolute()),)).split()
        if not told:
            raise UsageError(f"{file} holds no commit; is the folder whole?")
        return told[0]

    def show(self, commit: str) -> None:
        """Bring the files of a commit into a working tree that has none of its own changes; HEAD stays."""
        self._run("restore", f"--source={commit}", "--worktree", paths=(":/",))

    def keep(self, name: str, commit: str) -> None:
        """Keep a snapshot from being collected."""
        self._run("update-ref", names=(f"refs/cudadent42/{name}", commit))

    def patch(self, old: str, new: str) -> bytes:
        """The difference of two commits, binary files included."""
        return self._run(*_PATCH, "--binary", "--full-index", names=(old, new))

    def places(self, old: str, new: str) -> str:
        """The difference for `changes.count`: without context, so that each heading is that of the changed line."""
        return self._text(*_PATCH, "--unified=0", names=(old, new))

    def same(self, one: str, other: str) -> bool:
        """Whether two snapshots hold the same files."""
        trees = self._text("rev-parse", names=(f"{one}^{{tree}}", f"{other}^{{tree}}")).split()
        return trees[0] == trees[1]

    def revert(self, old: str, new: str) -> tuple[str, ...]:
        """Take back what ``new`` changed over ``old``, file by file; the paths. What was reverted before stays so.

        Raises UsageError, with nothing touched, as `to_revert` does.
        """
        wanted = self.to_revert(old, new)
        restored = [path for path, entry in wanted.items() if entry != _ABSENT]
        if restored:
            self._run(
                "restore",
                f"--source={old}",
                "--worktree",
                paths=[f":(top,literal){path}" for path in restored],
            )
        for path, entry in wanted.items():
            if entry == _ABSENT:
                (self.root / path).unlink(missing_ok=True)
        return tuple(wanted)

    def to_revert(self, old: str, new: str) -> dict[str, str]:
        """The files that `revert` would bring back to ``old``, with mode and content there; empty for none.

        Raises UsageError where a file is neither as in ``new`` nor as in ``old``: somebody has worked on it since.
        """
        before, after = self._entries(old, new)
        now = {path: self._entry(path, before[path], after[path]) for path in before}
        touched = [path for path in before if now[path] not in (before[path], after[path])]
        if touched:
            raise UsageError(
                f"{', '.join(sorted(touched)[:5])} changed since the attempt, so it is not reverted; the attempt's "
                "diff is in the session folder: take it back by hand, or give --keep"
            )
        return {path: entry for path, entry in before.items() if now[path] != entry}

    def _entries(self, old: str, new: str) -> tuple[dict[str, str], dict[str, str]]:
        """Mode and content of every file that differs, in the one and in the other."""
        fields = self._run("diff-tree", "-r", "-z", "--no-renames", names=(old, new)).split(b"\0")
        before, after = {}, {}
        for about, name in zip(fields[0::2], fields[1::2], strict=False):
            old_mode, new_mode, one, other, _ = about.decode().removeprefix(":").split()
            path = os.fsdecode(name)
            before[path] = _ABSENT if set(one) == {"0"} else f"{old_mode} {one}"
            after[path] = _ABSENT if set(other) == {"0"} else f"{new_mode} {other}"
        return before, after

    def _entry(self, path: str, before: str, after: str) -> str:
        """Mode and content of a file as it is now. Whether it may be executed is asked only where that is what changed:
        elsewhere the file system need not tell (``core.fileMode``)."""
        file = self.root / path
        if file.is_symlink():
            blob = self._run("hash-object", "--stdin", given=os.fsencode(file.readlink()))
            return f"{_LINK} {blob.decode().strip()}"
        if not file.exists():
            return _ABSENT
        modes = {entry.partition(" ")[0] for entry in (before, after)} & {_FILE, _EXECUTABLE}
        if len(modes) != 1:
            modes = {_EXECUTABLE if file.stat().st_mode & stat.S_IXUSR else _FILE}
        return f"{modes.pop()} {self._text('hash-object', f'--path={path}', paths=(str(file),)).strip()}"

    def _untracked(self) -> Iterator[bytes]:
        """New files that are source: not what was measured or logged meanwhile, which no attempt may take along."""
        listed = self._run("ls-files", "-z", "--others", "--exclude-standard", "--full-name", paths=_SOURCE)
        measured: dict[Path, bool] = {}
        for name in listed.split(b"\0"):
            path = self.root / os.fsdecode(name)
            if not name or not path.is_file() or path.stat().st_size > UNTRACKED_LIMIT:
                continue
            if path.suffix in _LOGS or is_bytecode(path.relative_to(self.root)):
                continue
            if not self._is_measured(path.parent, measured):
                yield name

    def _is_measured(self, folder: Path, answers: dict[Path, bool]) -> bool:
        """Whether a folder is one of the lab's own, or lies in one."""
        if folder == self.root:
            return False
        if folder not in answers:
            answers[folder] = (
                (folder.parent == self.root and folder.name in _RESULTS)
                or all((folder / name).is_file() for name in (MANIFEST, LOG))
                or self._is_measured(folder.parent, answers)
            )
        return answers[folder]

    def _commit(self, environment: Mapping[str, str], head: str) -> str:
        tree = self._run("write-tree", environment=environment).decode().strip()
        done = self._run("commit-tree", "-m", _MESSAGE, "-p", head, names=(tree,), environment=_IDENTITY)
        return done.decode().strip()

    def _root(self, tree: str) -> str:
        """A commit of a tree that has no parent."""
        return self._run("commit-tree", "-m", _MESSAGE, names=(tree,), environment=_IDENTITY).decode().strip()

    @contextmanager
    def _index(self) -> Iterator[dict[str, str]]:
        with tempfile.TemporaryDirectory(prefix="cudadent42-index-") as folder:
            yield {"GIT_INDEX_FILE": str(Path(folder) / "index")}

    def _text(self, *words: str, names: Sequence[str] = (), paths: Sequence[str] | None = None) -> str:
        return self._run(*words, names=names, paths=paths).decode("utf-8", errors="replace")

    def _try(self, *words: str, names: Sequence[str] = ()) -> bytes | None:
        try:
            return self._run(*words, names=names)
        except UsageError:
            return None

    def _run(
        self,
        *words: str,
        names: Sequence[str] = (),
        paths: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        given: bytes = b"",
    ) -> bytes:
        with _failing(self.root, words[0]):
            return git.run(self.root, *words, names=names, paths=paths, environment=environment, given=given)


def _object_format(bundle: Path) -> str:
    """What a repository for the bundle is to be made with. Raises UsageError where it cannot be read."""
    try:
        with bundle.open("rb") as file:
            head = file.read(len(_BUNDLE_OF_SHA256))
    except OSError as error:
        raise UsageError(f"{bundle} cannot be read: {error.strerror}") from error
    return "sha256" if head == _BUNDLE_OF_SHA256.encode() else "sha1"


def find(folder: Path) -> Tree | None:
    """The working tree that ``folder`` is in; None outside of git, or before its first commit."""
    try:
        return Tree(git.root(folder, with_commit=True))
    except git.GitError:
        return None


def create(folder: Path, bundle: Path) -> Tree:
    """A new repository in ``folder`` with the files of the bundle. Raises UsageError where it is no bundle."""
    with _failing(folder, "init"):
        git.run(
            folder,
            "init",
            "--quiet",
            f"--initial-branch={BRANCH}",
            f"--object-format={_object_format(bundle)}",
        )
    tree = Tree(folder)
    commit = tree.unbundle(bundle)
    with _failing(folder, "reset"):
        git.run(folder, "reset", "--quiet", "--hard", names=(commit,))
    return tree


@contextmanager
def _failing(folder: Path, command: str) -> Iterator[None]:
    """git's failure as the user's error. Raises MachineNotReadyError, UsageError."""
    try:
        yield
    except git.GitMissingError as error:
        raise MachineNotReadyError("git is not installed; a session that changes source needs it") from error
    except git.GitError as error:
        raise UsageError(f"git {command} in {folder} failed: {error}") from error
