"""The one way in which git is started: in a folder that is named, whatever was exported around this process.

git exports to its hooks, and to what its aliases start, which repository, index and object store it means. Here that
would be another repository than that of the folder, so they are dropped, as git itself does in a submodule.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from cudadent42.base import git_programs
from cudadent42.base.paths import real_path

TIMEOUT_S = 120
"""Of the longest: reading a tree of a large repository from a slow disk."""

REPOSITORY_VARIABLES = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_CONFIG",
    "GIT_DIR",
    "GIT_GRAFT_FILE",
    "GIT_IMPLICIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_INTERNAL_SUPER_PREFIX",
    "GIT_NAMESPACE",
    "GIT_NO_REPLACE_OBJECTS",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_QUARANTINE_PATH",
    "GIT_REPLACE_REF_BASE",
    "GIT_SHALLOW_FILE",
    "GIT_WORK_TREE",
)
"""What ``git rev-parse --local-env-vars`` lists, and what a push exports, without the two that hold configuration
(``GIT_CONFIG_PARAMETERS``, ``GIT_CONFIG_COUNT``): ``safe.directory`` may be given in them."""

_PATH_VARIABLES = (
    "GIT_GLOB_PATHSPECS",
    "GIT_ICASE_PATHSPECS",
    "GIT_LITERAL_PATHSPECS",
    "GIT_NOGLOB_PATHSPECS",
)
"""They change what a path among the arguments means."""

_ALWAYS = {
    # What git says is read here: not in the user's language.
    "LC_ALL": "C",
    "GIT_TERMINAL_PROMPT": "0",
    # Looking at a repository takes no lock of it, so that nobody at work in it is told to wait.
    "GIT_OPTIONAL_LOCKS": "0",
    **git_programs.ENVIRONMENT,
}

_REASON_LENGTH = 300


class GitError(Exception):
    """git did not do it; what it said. Each caller knows what that means to its user, and says so."""


class GitMissingError(GitError):
    """git is not installed."""


def run(
    folder: Path,
    *words: str,
    names: Sequence[str] = (),
    paths: Sequence[str] | None = None,
    given: bytes = b"",
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    allowed: Sequence[int] = (0,),
) -> bytes:
    """What ``git WORD... NAME... [-- PATH...]`` prints in ``folder``. No program that the repository names is started.

    Args:
        words: the command and its options, by this program. None is a user's.
        names: revisions, from anywhere. One that begins with ``-`` is refused: no revision does.
        paths: from anywhere; they stand after ``--``. None: no ``--`` either.
        given: its standard input.
        environment: further variables.
        allowed: exit codes that are no failure.

    Raises:
        GitMissingError: there is no git.
        GitError: it failed, or took longer than ``timeout_s``.
    """
    for name in names:
        if name.startswith("-") or "\0" in name:
            raise GitError(f"{name!r} is no revision")
    behind = () if paths is None else ("--", *paths)
    variables = {**surroundings(), **(environment or {})}
    settings = [*git_programs.ALWAYS, *_programs_off(folder, variables, timeout_s)]
    options = [option for key, value in settings for option in ("-c", f"{key}={value}")]
    done = _started(folder, [*options, *words, *names, *behind], words[0], given, variables, timeout_s)
    if done.returncode not in allowed:
        raise GitError(_reason(done))
    return done.stdout


def _programs_off(
    folder: Path, variables: Mapping[str, str], timeout_s: float
) -> tuple[tuple[str, str], ...]:
    """The settings that keep git from starting what the repository names; see `git_programs`."""
    listed = _started(folder, git_programs.LISTING, "config", b"", variables, timeout_s)
    if listed.returncode:
        raise GitError(_reason(listed))
    try:
        return git_programs.switched_off(listed.stdout)
    except git_programs.UnusableSettingError as error:
        raise GitError(str(error)) from error


def _started(
    folder: Path,
    arguments: Sequence[str],
    command: str,
    given: bytes,
    variables: Mapping[str, str],
    timeout_s: float,
) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["git", "--no-pager", "-C", str(folder), *arguments],
            input=given,
            capture_output=True,
            timeout=timeout_s,
            env=variables,
            check=False,
        )
    except FileNotFoundError as error:
        raise GitMissingError("git is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise GitError(f"git {command} took longer than {timeout_s:g} s") from error
    except OSError as error:
        raise GitError(f"git {command}: {error.strerror or error}") from error


def text(
    folder: Path,
    *words: str,
    names: Sequence[str] = (),
    paths: Sequence[str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> str:
    """As ``run``, as text. Raises like ``run``."""
    printed = run(folder, *words, names=names, paths=paths, timeout_s=timeout_s)
    return printed.decode("utf-8", errors="replace")


def root(folder: Path, *, with_commit: bool = False) -> Path:
    """The top of the working tree that ``folder`` is in. Raises like ``run``; GitError where it is in none.

    Also GitError where the repository's ``core.worktree`` names another folder: its files are not what was meant.
    ``with_commit``: GitError where it has no commit yet, too.
    """
    words = ("--show-toplevel", *(("--verify", "--quiet", "HEAD") if with_commit else ()))
    told = run(folder, "rev-parse", *words).removesuffix(b"\n")
    # A folder's name may have a line's end in it, the commit's has none.
    top = Path(os.fsdecode(told.rpartition(b"\n")[0] if with_commit else told))
    if not real_path(folder).is_relative_to(real_path(top)):
        raise GitError(f"its settings say that its files are in {top} (core.worktree)")
    return top


def surroundings() -> dict[str, str]:
    """This process's environment, without what would lead git to another repository or make it ask."""
    dropped = {*REPOSITORY_VARIABLES, *_PATH_VARIABLES}
    return {**{name: value for name, value in os.environ.items() if name not in dropped}, **_ALWAYS}


def _reason(done: subprocess.CompletedProcess[bytes]) -> str:
    """From its first word of failure on, without hints: `safe.directory` takes several lines to be told."""
    said = (done.stderr or done.stdout).decode("utf-8", errors="replace").splitlines()
    lines = [line.strip() for line in said if line.strip() and not line.startswith("hint:")]
    failures = [index for index, line in enumerate(lines) if line.startswith(("fatal: ", "error: "))]
    told = " ".join(lines[failures[0] :] if failures else lines[-1:])
    return told[:_REASON_LENGTH] or f"exit code {done.returncode}"
