"""The POSIX scripts that run on the far side. They are sent with every call, so they are as new as the caller."""

from __future__ import annotations

import importlib.resources

_SHARED = "processes.sh"


def script(name: str) -> str:
    """The text of a script beside this module, with what all of them share before it."""
    folder = importlib.resources.files("cudadent42.remote.core")
    return (folder / _SHARED).read_text() + (folder / name).read_text()
