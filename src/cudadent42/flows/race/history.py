"""git's own bisection over a repository, in a folder apart: the user's checkout, index and refs are never touched.

The folder is an empty repository that borrows the other's objects. git decides which commit comes next and when it is
over; nothing is checked out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from cudadent42.base import git
from cudadent42.base.errors import LabError, MachineNotReadyError, UsageError
from cudadent42.versions.sources import ask

_NO_CONFIGURATION = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
"""The folder is no repository of the user's, so neither their templates nor their settings are for it."""
_FIRST_BAD = re.compile(r"^# first bad commit: \[([0-9a-f]+)\]", re.MULTILINE)
_POSSIBLE = re.compile(r"^# possible first bad commit: \[([0-9a-f]+)\]", re.MULTILINE)
_SUBJECT_ALONE = ("--no-patch", "--no-color", "--no-show-signature", "--format=%s")


class Mark(str, Enum):
    """What git is told of a commit."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skip"


@dataclass(frozen=True)
class Position:
    """How far a bisection is."""

    next: str = ""
    """The commit to judge; empty when it is over."""
    first_bad: str = ""
    """The first bad commit, if it is known."""
    possible: tuple[str, ...] = ()
    """What it could be, where only skipped commits are left."""


class Bisection:
    """One bisection between a good and a bad commit, in ``folder``, which must not exist."""

    def __init__(self, folder: Path, root: Path, good: str, bad: str, paths: tuple[str, ...]) -> None:
        """``paths``: only commits that touch them count; all if empty.

        Raises LabError where git does not go along, e.g. in a shallow clone that lacks the commits between.
        """
        self._folder = folder
        folder.mkdir(parents=True)
        layout = ask(root, "rev-parse", "--show-object-format") or "sha1"
        self._git("init", "--quiet", f"--object-format={layout.strip()}")
        objects = _absolute(root, "objects")
        (folder / ".git/objects/info/alternates").write_text(f"{objects}\n", encoding="utf-8")
        shallow = Path(_absolute(root, "shallow"))
        if shallow.is_file():
            (folder / ".git/shallow").write_bytes(shallow.read_bytes())
        self._git("update-ref", "--no-deref", "HEAD", names=(bad,))
        self._git("bisect", "start", "--no-checkout", names=(bad, good), paths=paths)

    def position(self) -> Position:
        log = self._git("bisect", "log")
        match = _FIRST_BAD.search(log)
        if match:
            return Position(first_bad=match[1])
        possible = tuple(_POSSIBLE.findall(log))
        if possible:
            return Position(possible=possible)
        current = ask(self._folder, "rev-parse", "--verify", "--quiet", "BISECT_HEAD")
        if current is None:
            raise LabError(
                "git's bisection has no next commit and no result; is the good commit older than the bad?"
            )
        return Position(next=current.strip())

    def mark(self, commit: str, mark: Mark) -> None:
        self._git("bisect", mark.value, names=(commit,), allowed=(0, _ONLY_SKIPPED_LEFT))

    def _git(
        self,
        *words: str,
        names: Sequence[str] = (),
        paths: Sequence[str] | None = None,
        allowed: Sequence[int] = (0,),
    ) -> str:
        try:
            return git.run(
                self._folder,
                *words,
                names=names,
                paths=paths,
                environment=_NO_CONFIGURATION,
                allowed=allowed,
            ).decode("utf-8", errors="replace")
        except git.GitMissingError as error:
            raise MachineNotReadyError("git is not installed; a bisection needs it") from error
        except git.GitError as error:
            raise UsageError(f"git {' '.join(words[:2])}: {error}") from error


_ONLY_SKIPPED_LEFT = 2
"""Exit code of ``git bisect`` where the first bad commit cannot be told from skipped ones."""


def _absolute(root: Path, name: str) -> str:
    path = ask(root, "rev-parse", "--path-format=absolute", "--git-path", name)
    if path is None:
        raise UsageError(f"git cannot tell where {root.name} keeps its {name}; is it a repository?")
    return path.rstrip("\n")


def subject(root: Path, commit: str) -> str:
    """The first line of a commit's message."""
    return (ask(root, "show", *_SUBJECT_ALONE, names=(commit,)) or "").strip()


def parent_of(root: Path, commit: str) -> str:
    """The first parent; empty for a root commit."""
    return (ask(root, "rev-parse", "--verify", "--quiet", names=(f"{commit}^1",)) or "").strip()
