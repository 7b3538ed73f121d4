"""git's own bisection over a repository, in a folder apart: the user's checkout, index and refs are never touched.

The folder is an empty repository that borrows the other's objects. git decides which commit comes next and when it is
over; nothing is checked out.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from cudadent42.errors import LabError, UsageError
from cudadent42.race.sources import git

_TIMEOUT_S = 120
_FIRST_BAD = re.compile(r"^# first bad commit: \[([0-9a-f]+)\]", re.MULTILINE)
_POSSIBLE = re.compile(r"^# possible first bad commit: \[([0-9a-f]+)\]", re.MULTILINE)


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
    found: str = ""
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
        layout = git(root, "rev-parse", "--show-object-format") or "sha1"
        self._git("init", "--quiet", f"--object-format={layout.strip()}")
        objects = _absolute(root, "objects")
        (folder / ".git/objects/info/alternates").write_text(f"{objects}\n", encoding="utf-8")
        shallow = Path(_absolute(root, "shallow"))
        if shallow.is_file():
            (folder / ".git/shallow").write_bytes(shallow.read_bytes())
        self._git("update-ref", "--no-deref", "HEAD", bad)
        self._git("bisect", "start", "--no-checkout", bad, good, "--", *paths)

    def position(self) -> Position:
        log = self._git("bisect", "log")
        found = _FIRST_BAD.search(log)
        if found:
            return Position(found=found[1])
        possible = tuple(_POSSIBLE.findall(log))
        if possible:
            return Position(possible=possible)
        current = git(self._folder, "rev-parse", "--verify", "--quiet", "BISECT_HEAD")
        if current is None:
            raise LabError(
                "git's bisection has no next commit and no result; is the good commit older than the bad?"
            )
        return Position(next=current.strip())

    def mark(self, commit: str, mark: Mark) -> None:
        self._git("bisect", mark.value, commit, allowed=(0, _ONLY_SKIPPED_LEFT))

    def _git(self, *arguments: str, allowed: tuple[int, ...] = (0,)) -> str:
        environment = {
            **os.environ,
            "LC_ALL": "C",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
        }
        for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
            environment.pop(name, None)
        try:
            done = subprocess.run(
                ["git", "-C", str(self._folder), *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                env=environment,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise LabError(f"git {' '.join(arguments[:2])} failed: {error}") from error
        if done.returncode not in allowed:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise UsageError(f"git {' '.join(arguments[:2])}: {said[-1] if said else 'failed'}")
        return done.stdout


_ONLY_SKIPPED_LEFT = 2
"""Exit code of ``git bisect`` where the first bad commit cannot be told from skipped ones."""


def _absolute(root: Path, name: str) -> str:
    found = git(root, "rev-parse", "--path-format=absolute", "--git-path", name)
    if found is None:
        raise UsageError(f"git cannot tell where {root.name} keeps its {name}; is it a repository?")
    return found.rstrip("\n")


def subject(root: Path, commit: str) -> str:
    """The first line of a commit's message."""
    return (git(root, "show", "--no-patch", "--format=%s", commit) or "").strip()


def parent_of(root: Path, commit: str) -> str:
    """The first parent; empty for a root commit."""
    return (git(root, "rev-parse", "--verify", "--quiet", f"{commit}^1") or "").strip()
