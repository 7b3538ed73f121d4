"""Which source is running: the git revision of this package's tree, and what is changed in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cudadent42.base import git
from cudadent42.base.reading import read_json
from cudadent42.base.serialise import decode

SOURCE_FILE = ".source.json"
"""In a working tree that was sent to another machine: the revision that it was sent from. No repository is there."""
_DIFF_LIMIT = 256 * 1024
_TIMEOUT_S = 60
"""A run without its revision is worth less than a minute; a busy machine or a cold disk takes its time."""
_PLAIN_DIFF = (
    *("--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/"),
    *("--submodule=short", "--ignore-submodules=dirty"),
)
"""Whatever the user's configuration makes of a diff: it is kept as one that can be applied. A submodule is its commit:
to look at its files git would start itself there, by that repository's settings."""


@dataclass(frozen=True)
class Revision:
    commit: str
    branch: str
    """Empty when detached."""
    dirty: bool
    diff: str
    """``git diff HEAD``; cut at 256 KiB. Untracked files are named, not included."""
    untracked: tuple[str, ...]

    @property
    def short(self) -> str:
        return self.commit[:8] + ("-dirty" if self.dirty else "")


def revision() -> Revision | None:
    """The revision of this package's source tree; None where it is installed elsewhere or git is missing."""
    package = Path(__file__).resolve().parent
    # A virtual environment inside somebody's repository is not that repository's source.
    if ask(package, "ls-files", "--error-unmatch", paths=(Path(__file__).name,)) is None:
        return _sent_with(package.parents[2])
    return revision_of(package)


def revision_of(folder: Path) -> Revision | None:
    """The revision of the git working tree that ``folder`` is in; None without one, or without commits."""
    commit = ask(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    branch = ask(folder, "symbolic-ref", "--quiet", "--short", "HEAD") or ""
    try:
        root = git.root(folder)
    except git.GitError:
        root = folder
    diff = ask(root, "diff", *_PLAIN_DIFF, "HEAD") or ""
    untracked = (ask(root, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    return Revision(
        commit=commit.strip(),
        branch=branch.strip(),
        dirty=bool(diff),
        diff=diff[:_DIFF_LIMIT],
        untracked=tuple(untracked[:100]),
    )


def _sent_with(root: Path) -> Revision | None:
    """What a working tree was sent with; None where this is none."""
    try:
        document = read_json(root / SOURCE_FILE)
        return None if document is None else decode(Revision, document)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def ask(folder: Path, *words: str, paths: Sequence[str] | None = None) -> str | None:
    """What git prints; None where it fails, or is missing."""
    try:
        return git.text(folder, *words, paths=paths, timeout_s=_TIMEOUT_S)
    except git.GitError:
        return None
