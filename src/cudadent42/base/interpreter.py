"""How the lab starts further processes of itself."""

from __future__ import annotations

import os
import sys

_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()
"""Without the current folder ahead of all others, where a file of a candidate's would pass for a module of Python's."""


def module_command(module: str, *options: str) -> list[str]:
    """The interpreter's command line for a module of the lab, up to the module's own arguments."""
    return [sys.executable, *options, *_SAFE_PATH, "-m", module]


def add_folder(folder: str | None = None) -> None:
    """What lies in the folder, or the current one, can be imported, where nothing else has its name: called when the
    lab's own modules are imported, for plug-ins that import their neighbours."""
    wanted = folder or os.getcwd()
    if wanted not in sys.path:
        sys.path.append(wanted)
