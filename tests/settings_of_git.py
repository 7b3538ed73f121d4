"""A repository's settings are listed once for the same files and surroundings, in tests about something else.

Before each command git is asked what the repository's settings would have it start: that is every second process of
git, and a session has hundreds. Here the answer is kept by the text of every file that it is read from, and by the
variables that git reads: repositories that tests make are alike. Tests of the question itself
(``base/test_git_programs.py``) ask each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

_Key = tuple[object, ...]

_READ_BY_GIT = ("GIT_", "HOME", "XDG_CONFIG_HOME", "PATH")
_SYSTEM = Path("/etc/gitconfig")


def list_settings_once(put: Callable[[object, str, object], None] = setattr) -> None:
    """From here on this process does, and what it forks."""
    from cudadent42.base import git

    ask = git._programs_off
    answers: dict[_Key, tuple[tuple[str, str], ...]] = {}

    def programs_off(
        folder: Path, variables: Mapping[str, str], timeout_s: float
    ) -> tuple[tuple[str, str], ...]:
        key = what_settings_follow_from(folder, variables)
        if key is None:
            return ask(folder, variables, timeout_s)
        if key not in answers:
            answers[key] = ask(folder, variables, timeout_s)
        return answers[key]

    put(git, "_programs_off", programs_off)


def what_settings_follow_from(folder: Path, variables: Mapping[str, str]) -> _Key | None:
    """None where that is more than the usual files: others that these include, a repository without a working tree, a
    working tree whose repository is elsewhere."""
    repository = _repository_of(folder)
    if repository is None:
        return None
    read = sorted((name, value) for name, value in variables.items() if name.startswith(_READ_BY_GIT))
    home = variables.get("HOME", "")
    own = Path(variables.get("XDG_CONFIG_HOME") or Path(home, ".config"))
    named = [
        Path(variables[name]) for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM") if variables.get(name)
    ]
    files = (
        *(_SYSTEM, own / "git/config", Path(home, ".gitconfig"), *named),
        *(repository / "config", repository / "config.worktree"),
    )
    texts = [_text(file) for file in files]
    if any("include" in text.lower() for text in texts):
        return None
    return (*read, *texts)


def _repository_of(folder: Path) -> Path | None:
    """The folder ``.git`` of the working tree that this one is in."""
    here = Path(os.path.abspath(folder))
    for each in (here, *here.parents):
        if (each / ".git").is_symlink() or (each / ".git").is_file() or (each / "HEAD").exists():
            return None
        if (each / ".git").is_dir():
            return each / ".git"
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        return type(error).__name__
