"""Which folder is a session's, and which session a run folder lies in.

The `session` package writes sessions. Who reads run folders has to know where those of a session are.
"""

from __future__ import annotations

from pathlib import Path

EVENTS = "events.jsonl"
"""A session's log, by which its folder is told from others."""


def is_session(folder: Path) -> bool:
    return (folder / EVENTS).is_file()


def session_of(folder: Path) -> Path | None:
    """The session that a run folder lies in: ``sessions/<session>/runs/<run>``."""
    owner = folder.absolute().parent.parent
    return owner if is_session(owner) else None
