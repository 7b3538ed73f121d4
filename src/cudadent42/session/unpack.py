"""A session's folder on a machine that has nothing else: its source, as the session last recorded it, in a new
repository, with the session in it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.session import folder as folders
from cudadent42.session.folder import Session
from cudadent42.session.snapshots import local
from cudadent42.session.tree import create


def unpack(session: Session, target: Path) -> Session:
    """Make a repository at ``target`` with the source of the session and the session itself; what it goes on with.

    The files are those of the change that is being decided on, else of the last that was kept. ``target`` appears
    whole or not at all.

    Raises UsageError where it exists already, or the folder does not hold the source.
    """
    bundle = session.path / folders.SOURCE
    if not bundle.is_file():
        raise UsageError(
            f"{session.path} does not hold the source ({folders.SOURCE}); put the folder into {folders.SESSIONS}/ of a "
            "clone that has the commit that the session began at"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists and is not empty; name a new folder")
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
        try:
            _fill(temporary, session, bundle)
            os.chmod(temporary, 0o755)
            os.rename(temporary, target)  # onto an empty folder, or none
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise UsageError(
            f"cannot make {target}: {error.strerror}; free some space or name another folder"
        ) from error
    return folders.load(target / folders.SESSIONS / session.name)


def _fill(folder: Path, session: Session, bundle: Path) -> None:
    tree = create(folder, bundle)
    sessions = folder / folders.SESSIONS
    # The source may hold any link. What is written next would follow this one out of the new folder.
    if sessions.is_symlink() or (sessions.exists() and not sessions.is_dir()):
        raise UsageError(
            f"the source in {bundle} has a {folders.SESSIONS} that is no folder, where the session belongs; "
            "unpack only the folders of sessions that you trust"
        )
    shutil.copytree(session.path, sessions / session.name, symlinks=True, ignore=_no_files)
    folders.hide(sessions)
    state = session.state
    wanted = state.pending.commit if state.pending is not None else state.parent
    tree.show(local(tree, session.path, state, wanted))


def _no_files(folder: str, names: list[str]) -> set[str]:
    """What is neither a file nor a folder: a session has no links, and what is written later would follow them."""
    paths = {name: Path(folder, name) for name in names}
    return {
        name for name, path in paths.items() if path.is_symlink() or not (path.is_file() or path.is_dir())
    }
