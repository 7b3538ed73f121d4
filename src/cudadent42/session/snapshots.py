"""Snapshots of the source, from the folder of a session: made again where the repository does not have them."""

from __future__ import annotations

from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.base.reading import read_bytes
from cudadent42.session import folder as folders
from cudadent42.session.state import State
from cudadent42.session.tree import Tree


def local(tree: Tree, session: Path, state: State, commit: str) -> str:
    """The commit, in this repository, of what the session calls ``commit``: the same one, or one with the same files.

    It is made from the commit that the session began at and the patches in its folder, or from the bundle there.

    Raises UsageError where neither is to be had.
    """
    if tree.has(commit):
        return commit
    started = state.started
    if commit == started.base:
        bundle = session / folders.SOURCE
        if not tree.has(started.commit) and bundle.is_file():
            return tree.unbundle(bundle)
        return tree.rebuild(started.commit, _read(session / folders.BASE))
    attempt = next((item for item in state.attempts if item.commit == commit), None)
    if attempt is None:
        raise UsageError(f"{session} knows no snapshot {commit[:12]}; is the folder whole?")
    patch = _read(folders.attempt_file(session, attempt.number))
    return tree.rebuild(local(tree, session, state, attempt.parent), patch)


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}; is the session's folder whole?"
        ) from error
